"""Checkpoints of earlier versions open, and the config.yaml of earlier runs starts them again (tests/data/checkpoints)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from distributed.config.registry import REGISTRY, backend_entry
from tests.conformance.runs import newest
from tests.conftest import ROOT, needs_backend, needs_library
from tests.data.checkpoints.write import HERE, JOB, RUNS, STEP, rows_after

STEPS = 15
TORCH = [name for name, (arguments, _) in RUNS.items() if arguments == "torch float64" and name != "version-3"]
KERAS = [name for name, (arguments, _) in RUNS.items() if arguments == "keras float64"]
LATER = {
    "frozen": 2,
    "averaged": 2,
    "several": 2,
    "version-3": 3,
}  # name -> version of the order and the random numbers of samples
OF_VERSION_2 = Path(__file__).parent / "jobs" / "of_version_2.py"
pytestmark = pytest.mark.timeout(480)


def expected(name: str) -> dict[str, Any]:
    """Return how the run continued under the code that wrote it: rows of metrics.jsonl, and random numbers of rank 0."""
    return json.loads((HERE / name / "expected.json").read_text())


def old_checkpoint(name: str) -> Path:
    return newest(HERE / name)


def assert_goes_on(run: Path, name: str, rel: float = 1e-12, draws: bool = True) -> None:
    """Assert that `run` continues the checkpoint of `name` with the metrics and random numbers of the code that wrote it."""
    rows = rows_after(run, STEP)
    for row, before in zip(rows, expected(name)["rows"], strict=True):
        assert row.pop("split") == before.pop("split")
        assert row == pytest.approx(before, rel=rel), (name, row["step"])
    if draws:
        assert json.loads((run / "draws.json").read_text()) == expected(name)["draws"]


def goes_on_from(run_cli, run: Path, backend: str, arguments: str, names: list[str]) -> None:
    """Start `backend` once. Each fit resumes from the checkpoint of one of `names`."""
    command = f"train --script {JOB} --backend {backend} --nproc-per-node 2 --device cpu --run-dir {run} -- {arguments}"
    done = run_cli([*command.split(), *map(old_checkpoint, names)], cwd=ROOT)
    assert done.returncode == 0, done.output
    assert done.stdout.count(f"resumed from step-{STEP:08d}: step {STEP}, epoch 2") == len(names)


def fits(run: Path, names: list[str]) -> list[tuple[Path, str]]:
    """Return the run directory of each fit of one start, with the name of the checkpoint that it resumed from."""
    return [(run / f"fit-{number}" if number > 1 else run, name) for number, name in enumerate(names, 1)]


def test_ddp_opens_the_checkpoints_of_every_torch_backend(run_cli, tmp_path):
    names = [*TORCH, "deepspeed"]

    goes_on_from(run_cli, tmp_path, "pytorch-ddp", "torch float64", names)

    for run, name in fits(tmp_path, names):  # with another number of processes the generators are seeded again
        assert_goes_on(run, name, rel=1e-4 if name == "deepspeed" else 1e-12, draws=name != "single")


def test_ddp_opens_the_checkpoints_of_every_engine_of_keras(run_cli, tmp_path):
    needs_library("keras", "tensorflow")

    goes_on_from(run_cli, tmp_path, "pytorch-ddp", "keras float64", KERAS)

    for run, name in fits(tmp_path, KERAS):  # an engine restores the generators from its own checkpoints
        assert_goes_on(run, name, draws=name == "keras-on-torch")


@pytest.mark.parametrize("name", LATER)
def test_what_later_checkpoints_hold_goes_on(run_cli, tmp_path, name):
    """Frozen parameters that are left out, averaged weights, several models, another version of the random numbers of samples."""
    goes_on_from(run_cli, tmp_path, "pytorch-ddp", RUNS[name][0], [name])

    assert_goes_on(tmp_path, name)
    assert json.loads((old_checkpoint(name) / "state.json").read_text())["train"]["data_version"] == LATER[name]


def test_the_config_of_an_old_run_starts_it_again(run_cli, tmp_path):
    assert_starts_again(run_cli, tmp_path / "2", "pytorch-ddp", *of_version_2("pytorch-ddp"))
    assert_starts_again(run_cli, tmp_path / "3", "pytorch-ddp", expected_of="version-3")


def of_version_2(name: str) -> list[Any]:
    """Return the flags that start a run with the random numbers of its time."""
    return ["--script", OF_VERSION_2, "--", *RUNS[name][0].split()]


def assert_starts_again(run_cli, run: Path, name: str, *flags: Any, expected_of: str | None = None) -> None:
    """Start the config.yaml of `name`. Assert that the numbers are those of the run `expected_of`, which is `name` by default."""
    done = run_cli(["train", "--config", HERE / name / "config.yaml", "--run-dir", run, *flags], cwd=ROOT)
    assert done.returncode == 0, done.output
    assert newest(run).name == f"step-{STEPS:08d}"
    assert_goes_on(run, expected_of or name, rel=1e-6 if name == "deepspeed" else 1e-12)


@pytest.mark.full
@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_goes_on_under_its_own_backend(run_cli, tmp_path, name):
    needs_backend_of(name)
    shutil.copytree(HERE / name, tmp_path, dirs_exist_ok=True)

    assert_starts_again(run_cli, tmp_path, name, "--resume")

    before = (HERE / name / "metrics.jsonl").read_text()
    assert (tmp_path / "metrics.jsonl").read_text().startswith(before)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("pytorch-ddp", "version-3")])
def test_the_config_of_every_old_run_starts_it_again(run_cli, tmp_path, name):
    needs_backend_of(name)

    assert_starts_again(run_cli, tmp_path, name, *of_version_2(name))


@pytest.mark.full
def test_tensorflow_opens_the_checkpoints_of_keras_on_torch(run_cli, tmp_path):
    needs_backend("tensorflow")

    goes_on_from(run_cli, tmp_path, "tensorflow", "keras float64", ["keras-on-torch"])

    assert_goes_on(tmp_path, "keras-on-torch", draws=False)


def needs_backend_of(name: str) -> None:
    """Skip the test if the backend that wrote the run `name` is not installed."""
    _, flags = RUNS[name]
    needs_backend(backend_entry(flags.split()[1]).name)
    if "keras" in name:
        needs_library("keras", "tensorflow")


def test_every_backend_of_the_first_version_has_an_old_checkpoint():
    """A backend that came later has none. Its checkpoint is added when the format changes (CONTRIBUTING.md)."""
    written = {flags.split()[1] for _, flags in RUNS.values()}
    assert written <= set(REGISTRY) and len(written) == 7
