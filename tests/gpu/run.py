"""`make test-gpu`: run the tests of tests/gpu and the GPT benchmark without installing anything.

The tests run with the Python of the machine. With GPU_REHEARSAL=cpu those that need no GPU run, to try out the tests.
Such a run says nothing about GPUs.

Exit codes: 0 everything passed, 1 a test or a goal failed, 2 a package is missing, 3 there is no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
REHEARSAL = os.environ.get("GPU_REHEARSAL") == "cpu"
BUDGET_S = 1800.0 if REHEARSAL else 470.0  # eight minutes with some reserve
BENCHMARK_S = 150.0  # part of the budget for the benchmark
_MODULES = {"PyYAML": "yaml"}  # module names of distributions that are imported by another name


def main() -> int:
    began = time.monotonic()
    if problem := _problem():
        print(f"make test-gpu: {problem[1]}", file=sys.stderr)
        return problem[0]
    print(f"make test-gpu: {_about()}", flush=True)
    environ = _environ()
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(HERE / "pytest.ini"),
        "-p",
        "no:cacheprovider",
        *_side_by_side(),
        *sys.argv[1:],
        str(HERE),
    ]
    code = _run(tests, environ, BUDGET_S - BENCHMARK_S)
    if len(sys.argv) > 1:  # only some tests were selected
        return code
    benchmark = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *(["--quick"] if REHEARSAL else [])]
    code = _run(benchmark, environ, BUDGET_S - (time.monotonic() - began)) or code
    print(f"make test-gpu: {'passed' if code == 0 else 'FAILED'} in {time.monotonic() - began:.0f} s", flush=True)
    if REHEARSAL:
        print("make test-gpu: this was a rehearsal on CPUs, no test of a GPU", flush=True)
    return 1 if code else 0


def _problem() -> tuple[int, str] | None:
    """Return the exit code and one line of text if the tests cannot run."""
    if sys.version_info < (3, 11):  # noqa: UP036  (the machine's own may be any)
        return 2, f"{sys.executable} is Python {sys.version.split()[0]}: set GPU_PYTHON to 3.11 or newer"
    sys.path.insert(0, str(ROOT))
    from distributed.config.gpus import visible_gpus

    if not REHEARSAL and visible_gpus() == 0:
        return 3, "no GPU here (GPU_REHEARSAL=cpu tries the tests out on CPUs)"
    lacking = [name for name in [*_requirements(), "torch", "pytest"] if not _is_there(name)]
    if lacking:
        return 2, f"{sys.executable} lacks {', '.join(lacking)}: set GPU_PYTHON to a Python that has them"
    import torch

    if not REHEARSAL and not torch.cuda.is_available():
        return 3, f"no GPU here that torch {torch.__version__} can use: it is built for CUDA {torch.version.cuda}"
    return None


def _side_by_side() -> list[str]:
    """Return the arguments with which pytest runs several tests at once. They share the GPU, and each needs some cores."""
    count = min(7, (os.cpu_count() or 1) // 2)
    return ["-n", str(count)] if count > 1 and importlib.util.find_spec("xdist") is not None else []


def _requirements() -> list[str]:
    """Return the distributions that the package requires."""
    import tomllib  # Python 3.11

    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [re.split(r"[^\w-]", each, maxsplit=1)[0] for each in content["project"]["dependencies"]]


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(_MODULES.get(name, name)) is not None


def _about() -> str:
    import torch

    if REHEARSAL:
        return f"rehearsal on CPUs, torch {torch.__version__}, Python {sys.version.split()[0]}"
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    gpus = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}"
    return f"{gpus}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}"


def _environ() -> dict[str, str]:
    """Return the environment of the tests: this checkout is first on the path, and variables of launchers are
    removed."""
    foreign = re.compile(r"^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_|TORCHELASTIC_|SLURM_|DISTRIBUTED_)")
    kept = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    path = [str(ROOT), str(HERE), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    path = [each for each in path if each != "."]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "GPU_SUITE": "1", "PYTHONUNBUFFERED": "1"}


def _run(command: list[str], environ: dict[str, str], limit_s: float) -> int:
    process = subprocess.Popen(command, env=environ, cwd=ROOT)
    try:
        return process.wait(max(limit_s, 1.0))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest ends the processes that it started and reports where it was
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        print(
            f"make test-gpu: {Path(command[-1]).name} was not done after {limit_s:.0f} s", file=sys.stderr, flush=True
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
