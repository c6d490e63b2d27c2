"""Each checkpoint that is saved in the background has the files of one that is saved at once, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed.checkpoints.manifest import list_checkpoints
from distributed.checkpoints.verifying import verify
from tests.conformance.jobs import zero
from tests.conformance.runs import FULL
from tests.conftest import needs_backend

JOB = Path(__file__).parent / "jobs" / "async_saves.py"


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [
        ("pytorch-ddp", 2),
        ("fsdp", 2),
        ("deepspeed", 2),
        *(pytest.param(*each, marks=FULL) for each in (("fsdp", 3), ("deepspeed", 1))),
    ],
)
def test_every_save_in_the_background_has_the_files_of_a_save_at_once(run_cli_once, tmp_path, backend, world_size):
    needs_backend(backend)
    command = ["train", "--script", str(JOB), "--backend", backend, "--nproc-per-node", str(world_size)]
    done = run_cli_once(
        [*command, "--run-dir", str(tmp_path / "run"), "--", str(tmp_path / "out"), backend], timeout=180
    )
    assert done.returncode == 0, done.output
    for name in zero.STAGES if backend == "deepspeed" else [backend]:
        # a later fit of a script has a directory of its own below `checkpoint_dir`
        found = [next((tmp_path / "out" / name / kind).rglob("step-*")).parent for kind in ("at-once", "async")]
        at_once, later = map(list_checkpoints, found)
        assert [info.step for info in at_once] == [info.step for info in later] and len(at_once) >= 4
        for one, other in zip(at_once, later, strict=True):
            ours, theirs = verify(one.path).files, verify(other.path).files
            assert ours.keys() == theirs.keys()
            # the state has times
            assert [file for file in ours if ours[file] != theirs[file]] == ["state.json"], (name, one.step)
