"""Write the run directories beside this file with the code of this checkout: python tests/data/checkpoints/write.py [NAME ...]

Each trains without interruption and is then cut back to what a run that was killed after its checkpoint in the middle of the second
epoch leaves. What came after the checkpoint goes to `expected.json`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
JOB = (HERE / "job.py").relative_to(ROOT)
STEP = 8
RUNS = {  # name -> (arguments of the job, flags)
    "single": ("torch float64", "--backend single"),
    "pytorch-ddp": ("torch float64", "--backend pytorch-ddp"),
    "fsdp": ("torch float64", "--backend fsdp"),
    "deepspeed": ("torch float32", "--backend deepspeed --set deepspeed.zero_stage=3"),  # the engine has no float64
    "horovod": ("torch float64", "--backend horovod"),
    "ray": ("torch float64", "--backend ray --set ray.cpus_per_worker=0.5"),
    "tensorflow": ("keras float64", "--backend tensorflow"),
    "keras-on-torch": ("keras float64", "--backend pytorch-ddp"),
    "keras-on-horovod": ("keras float64", "--backend horovod --set horovod.keras_backend=tensorflow"),
    # What came later
    "frozen": ("frozen float64", "--backend pytorch-ddp"),
    "averaged": ("averaged float64", "--backend pytorch-ddp"),
    "several": ("several float64", "--backend pytorch-ddp"),
    "version-3": ("torch float64", "--backend pytorch-ddp"),  # of the random numbers of samples
}
CLOCKS = ("time", "samples_per_second")


def lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def rows_after(run: Path, step: int) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl after `step`, without the clocks."""
    return [
        {name: value for name, value in row.items() if name not in CLOCKS}
        for row in lines(run / "metrics.jsonl")
        if row["step"] > step
    ]


def write_until(source: Path, target: Path, step: int) -> None:
    """Copy the lines of a file of JSON lines up to `step`."""
    target.write_text("".join(json.dumps(line) + "\n" for line in lines(source) if line["step"] <= step))


def write(name: str, scratch: Path) -> None:
    """Train as `RUNS[name]` says and keep what the test needs of its run directory."""
    arguments, flags = RUNS[name]
    run, kept = scratch / name, HERE / name
    processes = "1" if name == "single" else "2"
    command = f"train --script {JOB} {flags} --nproc-per-node {processes} --device cpu --run-dir {run} -- {arguments}"
    subprocess.run([sys.executable, "-m", "distributed.cli", *command.split()], cwd=ROOT, check=True)
    shutil.rmtree(kept, ignore_errors=True)
    checkpoint = Path("checkpoints", f"step-{STEP:08d}")
    shutil.copytree(run / checkpoint, kept / checkpoint)
    shutil.copy(run / "config.yaml", kept)
    for file in ("events.jsonl", "metrics.jsonl"):
        write_until(run / file, kept / file, STEP)
    expected = {"rows": rows_after(run, STEP), "draws": json.loads((run / "draws.json").read_text())}
    (kept / "expected.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        for chosen in sys.argv[1:] or RUNS:
            write(chosen, Path(scratch))
