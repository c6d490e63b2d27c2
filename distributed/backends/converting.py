"""Convert the weights in checkpoints of other programs to safetensors files. A child process reads the checkpoints.

This module recognizes the format of a file or directory. `_torch/foreign.py` reads it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.checkpoints.durable import sync
from distributed.checkpoints.manifest import MANIFEST
from distributed.checkpoints.tensor_file import read_raw
from distributed.checkpoints.weights import PICKLES
from distributed.config.libraries import is_installed
from distributed.config.reading import read_bytes
from distributed.errors import CheckpointError, ConfigError

# Files beside the weights in the directories of Accelerate and of the Trainer of transformers.
_NOT_WEIGHTS = ("optimizer*", "scheduler*", "scaler*", "sampler*", "random_states_*", "rng_state*", "training_args*")
_LONGEST_TAG = 255  # bytes of a file name


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A checkpoint of another program.

    Attributes:
        path: the file or directory.
        format: "torch" (files of `torch.save`), "DCP" (torch.distributed.checkpoint), "DeepSpeed" or "safetensors".
        files: the files of "torch" and "safetensors"; empty otherwise.
    """

    path: Path
    format: str
    files: Sequence[Path] = ()

    @property
    def runs_code(self) -> bool:
        """Return whether this format cannot be read without unpickling objects of any class."""
        return self.format in ("DCP", "DeepSpeed")


@dataclasses.dataclass(frozen=True)
class Converted:
    """Facts about a file that was written.

    Attributes:
        format: see `Foreign`.
        num_tensors: number of tensors in the file.
        num_bytes: size of the file.
        skipped: names of entries that are not tensors, such as extra state of modules.
        is_isolated: whether the process that read the checkpoint had no network. True for "safetensors", which runs no code.
    """

    format: str
    num_tensors: int
    num_bytes: int
    skipped: tuple[str, ...]
    is_isolated: bool


def recognize(path: Path) -> Foreign:
    """Return the format and files of `path`, recognized by file names. Raises CheckpointError if it cannot be converted."""
    if path.is_file():
        if path.suffix in PICKLES:
            return Foreign(path, "torch", [path])
        if path.suffix == ".safetensors":
            raise CheckpointError(f"{path} is a safetensors file already: init_from and load_weights take it as it is")
        raise CheckpointError(f"{path} is none of {', '.join(PICKLES)}: name a checkpoint of another program")
    if not path.is_dir():
        raise CheckpointError(f"there is no {path}: name a checkpoint of another program, a file or a directory")
    if (path / MANIFEST).exists() or any(path.glob("checkpoints/step-*")):
        raise CheckpointError(
            f"{path} is a checkpoint of this package already: init_from and load_weights take it as it is"
        )
    if (path / ".metadata").is_file():
        return Foreign(path, "DCP")
    if any(path.glob("*_model_states.pt")):
        return Foreign(path, "DeepSpeed")
    if (tagged := _newest_of_deepspeed(path)) is not None:
        return Foreign(tagged, "DeepSpeed")
    if shards := sorted(path.glob("pytorch_model_fsdp_*/.metadata")):  # Accelerate with FSDP
        return Foreign(shards[0].parent, "DCP")
    if files := sorted(path.glob("*.safetensors")):
        return Foreign(path, "safetensors", files)
    files = sorted(file for file in path.iterdir() if file.suffix in PICKLES and not any(map(file.match, _NOT_WEIGHTS)))
    if len(files) > 1 and not all(file.name.startswith("pytorch_model") for file in files):
        raise CheckpointError(
            f"{path} has several files of weights ({', '.join(file.name for file in files[:4])}): name one"
        )
    if files:
        return Foreign(path, "torch", files)
    raise CheckpointError(
        f"{path} is no checkpoint that can be converted: give a file of torch.save, or a directory of torch.distributed.checkpoint,"
        " DeepSpeed, Lightning, Accelerate or the Trainer of transformers"
    )


def _newest_of_deepspeed(path: Path) -> Path | None:
    """Return the directory of a checkpoint that DeepSpeed's file `latest` names, or None if it names none."""
    try:
        tag = read_bytes(path / "latest", _LONGEST_TAG).decode().strip()
    except (OSError, ValueError):  # there is no such file, or it is not one of DeepSpeed
        return None
    return path / tag if tag and tag.isprintable() and any((path / tag).glob("*_model_states.pt")) else None


def convert(
    source: Path, out: Path, *, trust: bool = False, key: str | None = None, prefix: str = "", force: bool = False
) -> Converted:
    """Write the weights of `source`, a checkpoint of another program, to the safetensors file `out`.

    Only weights are converted. The states of optimizers, schedules and data loaders are left out.

    Args:
        source: a file of `torch.save`, such as one of Lightning, or a directory of torch.distributed.checkpoint, DeepSpeed, Lightning,
            Accelerate or the Trainer of transformers.
        out: the file to write.
        trust: whether code that the checkpoint contains may run, in a child process without network where the system allows it.
        key: where the weights are in the saved object, such as `state_dict` or `app.model`, if they are not found automatically.
        prefix: take only tensors whose names begin with this prefix, and remove it from the names. Use `model.` for the attribute
            `model` of a LightningModule.
        force: whether `out` may exist. It is replaced when the new file is complete.

    Raises:
        CheckpointError: the source is damaged, holds no weights, or would run code without `trust`.
        ConfigError: `out` exists or cannot be written.
    """
    foreign = recognize(source)
    if out.suffix != ".safetensors":
        raise ConfigError(f"{out} must end with .safetensors")
    if out.exists() and not force:
        raise ConfigError(f"{out} exists: add --force to replace it, or name another file")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no directory {out.parent} for {out.name}")
    if foreign.runs_code and not trust:
        raise _needs_trust(f"{foreign.path} is a checkpoint of {foreign.format}, which contains pickles")
    if foreign.format == "DeepSpeed" and not is_installed("deepspeed"):
        raise ConfigError(f"{foreign.path} is read by DeepSpeed itself: pip install 'distributed-trainer[deepspeed]'")
    stage = out.with_name(f".tmp-{out.name}-{os.getpid()}")
    try:
        answer = _read_in_child(foreign, stage, {"trust": trust, "key": key, "prefix": prefix})
        if not stage.is_file():
            raise CheckpointError(f"{foreign.path} cannot be read: its process has written no file")
        num_tensors, num_bytes = len(read_raw(stage)[0]), stage.stat().st_size
        stage.replace(out)
        sync(out.parent)
    finally:
        stage.unlink(missing_ok=True)
    return Converted(foreign.format, num_tensors, num_bytes, tuple(answer["skipped"]), answer["is_isolated"])


def _needs_trust(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what}: reading it can run code. If you trust where it comes from, add --trust. It is then read by a process without network"
        " where the system allows it"
    )


def _read_in_child(foreign: Foreign, out: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Read `foreign` in a child process, and return its answer. Raises CheckpointError with the problem that it reports."""
    order = {
        "path": str(foreign.path),
        "format": foreign.format,
        "files": [*map(str, foreign.files)],
        "out": str(out),
        **options,
    }
    content, error = _run_child(order)
    try:
        answer: dict[str, Any] = json.loads(content)
        answer = {"skipped": [*map(str, answer["skipped"])], "is_isolated": bool(answer["is_isolated"]), **answer}
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{foreign.path} cannot be read: {error}") from None
    if answer.get("untrusted"):
        raise _needs_trust(f"{foreign.path} needs {answer['untrusted']}")
    if answer.get("problem"):
        raise CheckpointError(f"{foreign.path}: {answer['problem']}")
    return answer


def _run_child(order: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the child's answer, and the last line of its stderr. Without such a line, return a text with its exit status."""
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as answers:
        # Do not show the child's output: code in a pickle may write to it, and messages of libraries are of no use here.
        child = subprocess.Popen(
            [sys.executable, "-m", "distributed.backends._torch.foreign", str(writes), json.dumps(order)], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, pass_fds=[writes],
        )  # fmt: skip
        os.close(writes)
        try:
            _, printed = child.communicate()
            content = answers.read(1 << 20)
        finally:
            child.kill()
            child.wait()
    lines = printed.decode(errors="replace").strip().splitlines()
    return content, lines[-1] if lines else f"its process ended with {child.returncode}"
