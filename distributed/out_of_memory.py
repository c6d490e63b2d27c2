"""Recognises that a process has too little memory, by the words of every engine, and says what can be done."""

from __future__ import annotations

from typing import Any

from distributed.backends import REGISTRY
from distributed.errors import TrainingError

_TYPES = {"MemoryError", "OutOfMemoryError", "ResourceExhaustedError"}
# What a RuntimeError says that has no class of its own: allocators of the host, CUDA, and libraries above it.
_WORDS = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error`, or what it came from, is for want of memory: by the words of torch, TensorFlow, CUDA and the host."""
    while error is not None:
        if _TYPES & {cls.__name__ for cls in type(error).__mro__}:
            return True
        if isinstance(error, (RuntimeError, OSError)) and any(word in str(error).lower() for word in _WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def memory_line(error: BaseException) -> str:
    """The line of it that says what was asked for."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if any(word in line.lower() for word in ("oom", *_WORDS))), lines[0])


def out_of_memory(error: BaseException, rank: int, step: int, batch_size: int, config: Any) -> TrainingError:
    """What a run ends with whose `rank` has too little memory in update `step`. Names what is not in use yet."""
    advice = [f"lower batch_size={batch_size} (a global_batch_size keeps the results)"] if batch_size > 1 else []
    if not config.activation_checkpointing:
        advice.append("set activation_checkpointing=true")
    if config.mixed_precision in ("no", False) and config.dtype == "float32":
        advice.append("set mixed_precision=bf16")
    cutting = next(row.name for row in REGISTRY.values() if row.cuts_model)
    advice.append(f"cut the model over several processes with backend={cutting}")
    line, is_cut, _ = memory_line(error).partition(" is free.")  # torch goes on at length
    return TrainingError(
        f"rank {rank} is out of memory in step {step}: {line.rstrip('.')}{is_cut and ' is free'}. To need less: {', or '.join(advice)}."
        " Trainer.find_batch_size() looks for the largest batch that fits"
    )
