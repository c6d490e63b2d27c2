"""`make test-gpu` says what is missing, and its tests are there to be run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "tests" / "gpu"
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=clean_environment(**environ), capture_output=True, text=True, timeout=250
    )


def test_make_says_in_one_line_that_there_is_no_gpu():
    done = run("make", "--silent", "test-gpu", f"GPU_PYTHON={sys.executable}", **NO_GPU)
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.startswith("make test-gpu: no GPU here (") and "Traceback" not in done.stderr


def test_without_a_gpu_no_framework_is_loaded():
    look = (
        "import runpy, sys\n"
        "try:\n    runpy.run_path(sys.argv[1], run_name='__main__')\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    assert run(sys.executable, "-c", look, str(SUITE / "run.py"), **NO_GPU).stdout == "3 False\n"


def test_what_the_machines_python_lacks_is_named():
    done = run(sys.executable, "-I", "-S", str(SUITE / "run.py"), GPU_REHEARSAL="cpu")  # without its site-packages
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert re.search(r"lacks cloudpickle, numpy, PyYAML, rich, safetensors, typer, xxhash, torch, pytest:", done.stderr)


def test_the_suite_is_collected_where_it_is_asked_for_and_nowhere_else():
    collect = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q")
    path = f"{ROOT}:{SUITE}"
    ours = run(
        *collect, "-c", str(SUITE / "pytest.ini"), str(SUITE), GPU_SUITE="1", GPU_REHEARSAL="cpu", PYTHONPATH=path
    )
    assert ours.returncode == 0, ours.stdout + ours.stderr
    modules = {path.stem for path in SUITE.glob("test_*.py")}
    assert modules == set(re.findall(r"(test_\w+)\.py", ours.stdout)) and len(ours.stdout.splitlines()) > 25
    assert run(*collect, str(SUITE)).returncode == 5  # pytest's word for no tests


def test_every_script_that_the_suite_starts_is_there():
    text = "".join(path.read_text() for path in SUITE.glob("test_*.py"))
    started = set(re.findall(r'run_job\("(\w+\.py)"', text))
    assert started == {path.name for path in (SUITE / "jobs").iterdir() if path.suffix == ".py"}
    for path in (SUITE / "jobs").glob("*.py"):
        compile(path.read_text(), str(path), "exec")


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_suite_can_be_rehearsed_on_cpus():
    done = subprocess.run(
        ["make", "--silent", "test-gpu", f"GPU_PYTHON={sys.executable}"], cwd=ROOT, env=clean_environment(GPU_REHEARSAL="cpu"),
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert re.search(r"\d+ passed", done.stdout)
