"""One run of a script for `distributed parity`: its command, and the weights, losses and step times that it produced."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.backends import groups_in_use
from distributed.checkpoints.manifest import list_checkpoints, resolve
from distributed.checkpoints.shards import AVERAGED, StoredTensor, read_tensors
from distributed.config.plan import BatchPlan
from distributed.config.reading import parse_yaml
from distributed.config.settings import GROUPS, DistributedConfig
from distributed.errors import BY_EXIT_CODE, ConfigError, DistributedError, TrainingError
from distributed.launching.subprocess_launch import run_command
from distributed.runs.directory import RunDirectory

if TYPE_CHECKING:
    import numpy


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the script."""

    backend: str
    world_size: int
    dtype: str
    # Slices of each batch, in a run that measures rounding; 0 stands for the comparison with the float64 run.
    cut: int = 1

    def __str__(self) -> str:
        how = f", cut in {self.cut}" if self.cut > 1 else ""
        return f"{self.backend}, {self.world_size} process{'es' * (self.world_size > 1)}, {self.dtype}{how}"


@dataclasses.dataclass(frozen=True)
class ParityOptions:
    """What to run."""

    script: str
    script_args: tuple[str, ...]
    backends: tuple[str, ...]
    is_all: bool  # whether a backend that cannot run is skipped instead of being an error
    world_sizes: tuple[int, ...]
    steps: int
    tolerance: float
    global_batch_size: int | None
    # KEY=VALUE for every run; an option of a backend is passed to runs of that backend only
    settings: tuple[str, ...]
    config: DistributedConfig  # `settings` as a configuration
    directory: Path  # the directory for all run directories


@dataclasses.dataclass(frozen=True)
class Start:
    """The weights and batches with which all runs start, taken from the first run.

    Without this, different engines and element types would draw different first weights.
    """

    checkpoint: Path
    batch: BatchPlan  # every run uses this global batch size, and so the same order of samples


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run produced."""

    weights: Mapping[str, numpy.ndarray[Any, Any]]
    losses: Mapping[
        tuple[Any, ...], float
    ]  # (split, step) -> loss; with several validation sets, the key ends with the name of the set
    batch: BatchPlan
    step_s: float  # median seconds of an update
    batch_dependent: tuple[str, ...]
    start: Start


def run(options: ParityOptions, cell: Cell, start: Start | None) -> Trained:
    """Run the script and return what it produced.

    Args:
        options: what to run.
        cell: the run to make.
        start: the weights and batches to start with, or None for the first run.

    Raises:
        DistributedError: the run failed. The message is that of the run.
    """
    name = f"{cell.backend}-{cell.world_size}-{cell.dtype}-{cell.cut}"
    directory = options.directory / name
    if start is not None:  # the directory looks like that of a run that was stopped, and --resume continues it
        shutil.copytree(start.checkpoint, directory / "checkpoints" / start.checkpoint.name)
    with (options.directory / f"{name}.log").open("wb+") as output:
        code = run_command(_command(options, cell, start, directory), output)
        if code:
            output.seek(0)
            raise _failure(code, output.read().decode(errors="replace"))
    if not (directory / "metrics.jsonl").exists():
        raise ConfigError(
            f"{options.script} ended without a fit of a Trainer, whose numbers are compared: give a script that trains"
        )
    return read_run(directory)


def _command(options: ParityOptions, cell: Cell, start: Start | None, directory: Path) -> list[str]:
    """Return the arguments of `python` for a run. Without `start`, the run also saves its first weights."""
    flags: dict[str, Any] = {
        "script": options.script, "run-dir": directory, "backend": cell.backend, "nproc-per-node": cell.world_size,
        "dtype": cell.dtype, "max-steps": options.steps, "epochs": options.steps, "log-every-n-steps": 1,
        "checkpoint-dir": "null", "checkpoint-frequency": "null", "checkpoint-every-n-steps": "null",
        "checkpoint-every-s": "null", "keep-latest-k": 1000, "max-restarts": 0, "mixed-precision": "no",
    }  # fmt: skip
    if start is not None:
        slices = start.batch.gradient_accumulation_steps * cell.cut
        flags |= {
            "global-batch-size": start.batch.global_batch_size,
            "gradient-accumulation-steps": slices,
            "batch-size": -(-start.batch.global_batch_size // (slices * cell.world_size)),
        }
    elif options.global_batch_size is not None:
        flags["global-batch-size"] = options.global_batch_size
    arguments = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    more = [
        word for setting in options.settings if is_for(options, setting, cell.backend) for word in ("--set", setting)
    ]
    begin = ["--set", "checkpoint_at_start=true"] if start is None else ["--resume"]
    return ["-m", "distributed.cli", "train", *arguments, *more, *begin, "--", *options.script_args]


def is_for(options: ParityOptions, setting: str, backend: str) -> bool:
    """Return whether `setting` applies to every run or is an option that applies to `backend`."""
    group = setting.partition(".")[0].strip()
    return group not in GROUPS or group in (*groups_in_use(options.config, backend), "data")


def _failure(code: int, text: str) -> DistributedError:
    """Return the error with the run's own message, and the last line of a traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    words = errors[-1].removeprefix("error: ").partition(" (whole log")[0] if errors else f"exit code {code}"
    if lines and not lines[-1].startswith("error: "):
        words += f": {lines[-1]}"
    return BY_EXIT_CODE.get(code, TrainingError)(words)


def read_run(directory: Path) -> Trained:
    """Return the weights, losses and step times of the run in `directory`."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    batch = _batch(directory)
    rates = [row["samples_per_second"] for row in rows if row["split"] == "train" and row.get("samples_per_second")]
    events = RunDirectory(directory).read_events()
    dependent = next((event.get("batch_dependent", ()) for event in events if event["event"] == "started"), ())
    return Trained(
        weights=weights_of(resolve(directory)),
        losses={
            (row["split"], row["step"], *name.split("_")[:-1]): _number(value)
            for row in rows
            # Only the first run may have rows of step 0: the other runs start from its checkpoint of that step.
            if row["step"]
            for name, value in row.items()
            if name == "loss" or name.endswith("_loss")
        },
        batch=batch,
        step_s=batch.global_batch_size / statistics.median(rates[2:] or rates or [math.nan]),
        batch_dependent=tuple(dependent),
        start=Start(list_checkpoints(directory / "checkpoints")[0].path, batch),
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _batch(directory: Path) -> BatchPlan:
    config = parse_yaml((directory / "config.yaml").read_bytes())
    size, steps, total = (config[n] for n in ("batch_size", "gradient_accumulation_steps", "global_batch_size"))
    world = json.loads((directory / "result.json").read_text())["world_size"]
    return BatchPlan(size, steps, world, total or size * steps * world)


def weights_of(checkpoint: Path) -> dict[str, numpy.ndarray[Any, Any]]:
    """Return every tensor of the model in a checkpoint, unsharded, as float64. Averaged weights are named averaged/NAME."""
    parts = {"": checkpoint, f"{AVERAGED}/": checkpoint / AVERAGED}
    return {
        f"{prefix}{name}": _array(tensor)
        for prefix, path in parts.items()
        if path.is_dir()
        for name, tensor in read_tensors(path / "model")[0].items()
    }


_KINDS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?"}


def _array(tensor: StoredTensor) -> numpy.ndarray[Any, Any]:
    import numpy

    array = numpy.frombuffer(tensor.read(), _KINDS[tensor.dtype])
    if tensor.dtype == "BF16":  # bfloat16 is the upper half of a float32
        array = (array.astype("<u4") << 16).view("<f4")
    return array.reshape(tensor.shape).astype("<f8")
