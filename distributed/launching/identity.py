"""Which start of a foreign launcher a worker belongs to: the same in every restart of it, another in any other start."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from distributed.launching.environment import WorkerEnvironment


def launch_identity(found: WorkerEnvironment, environ: Mapping[str, str] | None = None) -> str | None:
    """Eight hex digits, or None where the launcher tells nothing that a restart would tell again. Main process only."""
    environ = os.environ if environ is None else environ
    if found.source == "slurm":  # a requeued job keeps its number
        step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
        name = f"slurm {environ['SLURM_JOB_ID']}.{step}" if "SLURM_JOB_ID" in environ else ""
    elif "TORCHELASTIC_RESTART_COUNT" in environ:
        run_id = environ.get("TORCHELASTIC_RUN_ID", "none")
        name = f"torchrun {run_id}" if run_id != "none" else _parent_process()
    else:
        name = ""
    return hashlib.sha256(name.encode()).hexdigest()[:8] if name else None


def _parent_process() -> str:
    """torchrun itself, which lives on when it replaces its workers. A process id alone would come again."""
    pid = os.getppid()
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
    return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {pid} {started}"
