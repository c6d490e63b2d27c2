"""Write DeepSpeed's own checkpoint files, which only its tools read. They are pickles; this package never reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from distributed.checkpoints.durable import sync


class _Collector(CheckpointEngine):  # type: ignore[misc]
    """Collect what DeepSpeed saves on this rank, and write it after the last communication between ranks. A disk that
    is slow or fails on one rank then blocks no other rank."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Path, Any]] = []

    def create(self, info: Any) -> None:
        return None

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        return None

    def save(self, state_dict: Any, path: str) -> None:
        self.found.append((Path(path), state_dict))

    def load(self, path: str, map_location: Any = None) -> Any:
        raise NotImplementedError("these files are only read by DeepSpeed")

    def commit(self, info: Any) -> bool:
        return True

    def write(self) -> None:
        """Write the collected files. Raises OSError."""
        for path, content in self.found:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                torch.save(content, path)
            except RuntimeError as error:  # raised by torch if the disk fails
                raise OSError(f"{path.name}: {str(error).splitlines()[0]}") from None
            sync(path)


def save(wrapper: Any, directory: Path, step: int, *, is_main: bool) -> None:
    """Write the files of `engine.save_checkpoint` under `directory`. A collective: all ranks call it, and each writes
    its part.

    Raises OSError on the rank whose disk fails, after the last communication between ranks.
    """
    collector, before, tag = _Collector(), wrapper.checkpoint_engine, f"global_step{step}"
    wrapper.checkpoint_engine = collector
    wrapper._copy_recovery_script = lambda path: None  # call it only after the files were written
    try:
        wrapper.save_checkpoint(str(directory), tag=tag, save_latest=False)
    finally:
        wrapper.checkpoint_engine = before
        del wrapper._copy_recovery_script
    for _, content in collector.found:
        _add_frozen(wrapper, content)
    collector.write()
    if is_main:
        wrapper._copy_recovery_script(str(directory))
        (directory / "latest").write_text(tag)


def _add_frozen(wrapper: Any, content: dict[str, Any]) -> None:
    """Add the frozen parameters at stage 1.

    Workaround (DeepSpeed 0.19.8, deepspeedai/DeepSpeed#5439; may go when DeepSpeed saves them at stage 1 too):
    DeepSpeed leaves them out, and its tools then return a model without them.
    """
    if "frozen_param_shapes" in content and content["frozen_param_shapes"] is None:
        for name, of in (("shapes", wrapper._get_param_shape_func), ("fragments", wrapper._get_param_fragment_func)):
            content[f"frozen_param_{name}"] = wrapper._get_zero_frozen_param_attributes(of)
