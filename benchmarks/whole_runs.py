"""One command from start to end: seconds to the first step, the memory of all its processes, and the times of its
steps."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
LIMIT_S = 300
MARK = "BENCHMARK_TREE"


def run_once(command: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, float]:
    """Run `command` once. `{directory}` in it becomes the directory in which it reports its progress (marks.py).

    Returns:
        Seconds to the `first` step and of the `whole` run, MB of the process tree at its pause (`pss` and `peak`), and
        what the script measured itself.
    """
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as output:
        mark = uuid.uuid4().hex
        words = [word.replace("{directory}", directory) for word in command]
        complete = {**marked(mark), **(env or {})}
        begin = time.time()
        with subprocess.Popen(words, cwd=directory, env=complete, stdout=output, stderr=subprocess.STDOUT) as process:
            try:
                _wait_for_pause(process, Path(directory), output)
                memory = tree_memory(mark)
                Path(directory, "go").touch()
                code = process.wait(LIMIT_S)
            finally:
                process.kill()
                kill_tree(mark)  # workers that outlived the command
        if code != 0:
            raise SystemExit(f"{' '.join(words)} ended with {code}:\n{_text(output)}")
        measured = Path(directory, "measured.json")
        return {
            "first": float(Path(directory, "first-step").read_text()) - begin,
            "whole": time.time() - begin,
            **memory,
            **(json.loads(measured.read_text()) if measured.exists() else {}),
        }


def _wait_for_pause(process: subprocess.Popen[bytes], directory: Path, output: IO[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not (directory / "paused").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"the run did not come to its pause:\n{_text(output)}")
        time.sleep(0.01)


def _text(output: IO[str]) -> str:
    output.seek(0)
    return output.read()[-5000:]


def tree_memory(mark: str) -> dict[str, float]:
    """Return the memory in MB of all processes that carry `mark` in their environment.

    `pss` is their present memory, with shared pages counted once. `peak` adds how far each process has been above its
    present size.
    """
    now = above = 0
    for entry in tree(mark):
        try:
            now += _kilobytes((entry / "smaps_rollup").read_text(), "Pss")
            status = (entry / "status").read_text()
            above += _kilobytes(status, "VmHWM") - _kilobytes(status, "VmRSS")
        except OSError:  # the process has ended
            continue
    return {"pss": now / 1000, "peak": (now + above) / 1000}


def marked(mark: str) -> dict[str, str]:
    """Return the environment of a command whose processes `tree` finds."""
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    return {**os.environ, MARK: mark, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def kill_tree(mark: str) -> None:
    """Kill the processes that carry `mark`."""
    for entry in tree(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(entry.name), signal.SIGKILL)


def tree(mark: str) -> Iterator[Path]:
    """Yield the processes that carry `mark`, as directories of /proc."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                yield entry


def _kilobytes(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.M)
    return int(found[1]) if found else 0


def ratios(runs: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]], key: str) -> list[float]:
    """Return the ratio of each round."""
    return [run[key] / raw[key] for run, raw in zip(runs, base, strict=True)]
