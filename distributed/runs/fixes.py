"""What to try after a failure, in the words of docs/troubleshooting.md, of which a test holds each sentence."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fix:
    """A part of the cause of a failure, and what docs/troubleshooting.md says about it.

    Attributes:
        part: a part of the cause.
        heading: the heading of the page, or a part of it.
        sentences: sentences of the page below that heading.
    """

    part: str
    heading: str
    sentences: tuple[str, ...]


_LOADER = ("A loader worker was killed, usually because memory ran out.", "Use fewer workers or a smaller prefetch_factor.")
_WAITED = "Gloo reports that a rank did not take part in a collective within timeout_s."
_OTHER = ("Another rank has ended, and this message is only a consequence.", "If it does not, look at the logs of the other ranks.")

# The first one whose part is in the cause counts.
FIXES = (
    Fix("(SIGKILL)", "was killed by signal 9 (SIGKILL)",
        ("Most often, the kernel killed it because the machine or the container ran out of memory.",
         "Use smaller batches or fewer loader workers.")),
    Fix("(SIGBUS)", "was killed by signal 7 (SIGBUS)", ("Shared memory (/dev/shm) is full",)),
    Fix("no progress for", "no progress for",
        ("Usual causes: an endless loop, a lock that is never released, a download or a file system that does not answer,"
         " a collective that only some ranks call.",)),
    Fix("DataLoader worker (pid", "DataLoader worker (pid(s) ...) exited unexpectedly", _LOADER),
    Fix("Too many open files", "Too many open files", ("Raise the limit (ulimit -n 65536)",)),
    Fix("NCCL error", "NCCL error", ("Set NCCL_DEBUG=INFO in the environment of the command",)),
    Fix("collective operation timeout", "Watchdog caught collective operation timeout",
        ("A collective on GPUs waited longer than timeout_s (300 s), because a rank did not call it.",)),
    Fix("for recv operation to complete", "for recv operation to complete", (_WAITED,)),
    Fix("did not join within", "did not join within",
        ("If ranks of one node are missing, look for an if rank == 0: around fit(): every rank must call it.",)),
    Fix("lost the connection to another rank", "Connection closed by peer", _OTHER),
    Fix("Connection closed by peer", "Connection closed by peer", _OTHER),
)  # fmt: skip


def fix_of(cause: str) -> str:
    """Return what to try after a failure with the cause `cause`, or "" if nothing is known beyond its own text."""
    found = next((fix for fix in FIXES if fix.part in cause), None)
    return "" if found is None else " ".join(found.sentences)
