"""Tensors that are damaged in the newest checkpoints: an engine notices them while it loads, and goes on from an older checkpoint.

In the jobs every tensor is a large one, which is verified while it is read (see `distributed.checkpoints.part_checks`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.runs import FULL, JOB, arguments, assert_same
from tests.conftest import needs_backend

OF_TENSORFLOW = Path(__file__).parent / "jobs" / "tensorflow" / "resume.py"
ENGINES = {
    "pytorch-ddp": [], "single": ["--global-batch-size", "16"], "fsdp": [], "horovod": [], "ray": [], "tensorflow": [],
    "deepspeed": ["--set", "deepspeed.zero_stage=1"], "zero 3": ["--set", "deepspeed.zero_stage=3"],
}  # fmt: skip


def damage(checkpoint: Path, part: str) -> None:
    """Flip a bit inside a tensor of the last file of `part`, which is that of rank 1 if there are several."""
    file = sorted((checkpoint / part).glob("*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    content[begin + (len(content) - begin) // 2] ^= 16
    file.write_bytes(content)


@pytest.mark.parametrize(
    "engine", [pytest.param(each, marks=FULL if each not in ("pytorch-ddp", "fsdp") else ()) for each in ENGINES]
)
def test_damaged_tensors_are_noticed_while_they_are_loaded_and_older_ones_are_used(run_cli_once, tmp_path, engine):
    backend = "deepspeed" if engine == "zero 3" else engine
    needs_backend(backend)
    job = OF_TENSORFLOW if backend == "tensorflow" else JOB
    flags = ["--backend", backend, *ENGINES[engine]]
    world = 1 if backend == "single" else 2

    def train(out: Path, *more: str):
        out.mkdir(exist_ok=True)
        done = run_cli_once(arguments(out, [], *flags, *more, world=world, job=job), timeout=150)
        assert done.returncode == 0, done.output
        return done

    train(tmp_path / "clean")
    train(tmp_path / "hurt", "--max-steps", "10")
    checkpoints = tmp_path / "hurt" / "run" / "checkpoints"
    damage(checkpoints / "step-00000010", "optimizer")
    damage(checkpoints / "step-00000009", "model")

    done = train(tmp_path / "hurt", "--resume")

    set_aside = [line for line in done.stderr.splitlines() if line.startswith("warning") and "digest differs" in line]
    assert len(set_aside) == 2 and "optimizer" in set_aside[0] and "model" in set_aside[1], done.output
    assert "resumed from step-00000006" in done.stdout or "resumed from step-00000007" in done.stdout, done.output
    assert {path.name for path in checkpoints.glob("damaged-*")} == {
        "damaged-step-00000009", "damaged-step-00000010",
    }  # fmt: skip
    assert_same(tmp_path / "hurt", tmp_path / "clean")
