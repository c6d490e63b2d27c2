"""Suggest fixes after a failure, in sentences of docs/troubleshooting.md. A test compares them with the page."""

from __future__ import annotations

from collections.abc import Mapping

from distributed.config.registry import hint_of

# Part of a cause -> sentences of the page. Messages of engines are in the hints of the registry.
FIXES: Mapping[str, tuple[str, ...]] = {
    "(SIGKILL)": (
        "Most often, the kernel killed it because the machine or the container ran out of memory.",
        "Use smaller batches or fewer loader workers.",
    ),
    "(SIGABRT)": (
        "A library in C++ ended the process: for example NCCL after an error of the GPU, or gloo after ranks have called a collective"
        " with tensors of different shapes.",
        "Its message is in RUN/logs/rank-N.log.",
    ),
    "(SIGBUS)": ("Shared memory (/dev/shm) is full.",),
    "no progress for": (
        "Usual causes: an endless loop, a lock that is never released, a download or a file system that does not answer,"
        " a collective that only some ranks call.",
    ),
    "did not join within start_timeout": (  # of ranks
        "If ranks of one node are missing, look for an if rank == 0: around fit(): every rank must call it.",
    ),
    "did not join within": (  # of nodes
        "If a node is missing, its command was not started, or it does not reach --master-addr and --master-port.",
        "Run distributed doctor --num-nodes N --node-rank R --master-addr HOST on each node.",
    ),
    "lost the connection to another rank": (
        "Another rank has ended, and this message is only a consequence.",
        "Look at the logs of the other ranks.",
    ),
}
STANDING_STILL = (
    "py-spy dump --pid PID for each worker, to see where it waits.",
    "The ranks that are not in a collective are the cause.",
)


def fix_of(cause: str) -> str:
    """Return what to try after a failure with the cause `cause`, or "" if nothing is known beyond its own text."""
    found = next((sentences for part, sentences in FIXES.items() if part in cause), ())
    return hint_of(cause) or " ".join(found)
