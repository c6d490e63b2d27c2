"""Recognise the out-of-memory errors of every engine, and advise what to change."""

from __future__ import annotations

from typing import Any

from distributed.config.registry import REGISTRY
from distributed.errors import TrainingError

_TYPES = {"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"}
# Text of errors that are plain RuntimeErrors: from allocators of host memory, from CUDA, and from libraries that use CUDA.
_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error`, or an error that caused it, is for lack of memory in torch, TensorFlow, CUDA or on the host."""
    while error is not None:
        if _TYPES & {cls.__name__ for cls in type(error).__mro__}:
            return True
        if isinstance(error, (RuntimeError, OSError)) and any(word in str(error).lower() for word in _WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def memory_line(error: BaseException) -> str:
    """Return the line of the error that says how much memory was requested."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if any(word in line.lower() for word in ("oom", *_WORDS))), lines[0])


def out_of_memory(
    error: BaseException,
    rank: int,
    step: int,
    batch_size: int,
    config: Any,
    *,
    is_cut: bool = False,
    may_halve: bool = False,
) -> TrainingError:
    """Return the error for too little memory on `rank` in update `step`. It names only settings that are not in use yet.

    `is_cut` says whether the model is sharded over the processes already, and `may_halve` whether the launcher restarts the run with
    smaller micro-batches.
    """
    line, has_more, _ = memory_line(error).partition(" is free.")  # torch's message continues with details
    what = f"rank {rank} is out of memory in step {step}: {line.rstrip('.')}{has_more and ' is free'}"
    if may_halve and batch_size > 1:
        smaller = TrainingError(what)
        smaller.micro_batch = -(-batch_size // 2)
        return smaller
    advice = (
        [f"lower batch_size={batch_size} (with global_batch_size set, the results stay the same)"]
        if batch_size > 1
        else []
    )
    if not config.activation_checkpointing:
        advice.append("set activation_checkpointing=true")
    if config.mixed_precision in ("no", False) and config.dtype == "float32":
        advice.append("set mixed_precision=bf16")
    if not is_cut:
        cutting = next(entry.name for entry in REGISTRY.values() if entry.cuts_model)
        advice.append(f"shard the model across several processes with backend={cutting}")
    ways = f" To need less: {', or '.join(advice)}." if advice else ""
    return TrainingError(f"{what}.{ways} Trainer.find_batch_size() looks for the largest batch that fits")
