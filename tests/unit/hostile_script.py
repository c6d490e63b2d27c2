"""A plain script that reads checkpoints with escape sequences in names and texts. It prints what Python prints for each error."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from distributed import Callback, Trainer, load_weights
from distributed.checkpoints.manifest import STATE
from distributed.errors import CheckpointError
from tests.unit.hostile_files import seal

ESCAPE = "\x1b[2J\x9b\x07\r"
INPUTS = torch.randn(16, 4)
DATA = TensorDataset(INPUTS, INPUTS.sum(1, keepdim=True))


class Choosy(Callback):
    """A callback that quotes a state which it does not accept."""

    def state_dict(self) -> dict[str, Any]:
        return {"text": "plain"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state != self.state_dict():
            raise ValueError(f"the state {state['text']} is unknown")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1, bias=False)


def trainer(**settings: Any) -> Trainer:
    return Trainer(model(), optimizer="adamw", epochs=2, batch_size=8, device="cpu", callbacks=[Choosy()], **settings)


def tensors(content: dict[str, Any], num_bytes: int) -> Path:
    """Write a safetensors file."""
    file, header = Path("x.safetensors"), json.dumps(content).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))
    return file


def entry(dtype: str = "F32", shape: tuple[int, ...] = (1, 4), begin: int = 0) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + 16]}


def main() -> None:
    """Read each checkpoint. The last error ends the script."""
    good = max((Path(trainer().fit(DATA).run_dir) / "checkpoints").glob("step-*"))

    def forged(edit: Callable[[Path], object]) -> Path:
        shutil.rmtree(copied := Path("copied", good.name), ignore_errors=True)
        shutil.copytree(good, copied)
        edit(copied)
        return copied

    def changed(old: str, new: str) -> Path:
        def edit(path: Path) -> None:
            text = (path / STATE).read_text()
            assert old in text, old
            (path / STATE).write_text(text.replace(old, new.replace("ESCAPE", json.dumps(ESCAPE)[1:-1])))
            seal(path)

        return forged(edit)

    def other_tensors(path: Path) -> None:
        (path / "model" / "model.safetensors").write_bytes(tensors({ESCAPE: entry()}, 16).read_bytes())
        seal(path)

    def resume(path: Path) -> None:
        trainer(resume_from_checkpoint=str(path)).fit(DATA)

    two = {"weight": entry(), ESCAPE: entry(begin=16)}
    offsets = {"DCP_SHARDING_INFO": json.dumps({ESCAPE: {"saved_offsets": [3, 3]}})}
    print(load_weights(model(), tensors(two, 32), strict=False).describe())
    # A callback and a metric of an unknown name are named in a warning, or shown with the results.
    resume(changed('"callbacks": {', '"callbacks": {"ESCAPE": {"a": 1}, '))
    resume(changed('"best": {', '"best": {"val_ESCAPE": 0.5, '))
    cases: dict[str, Callable[[], object]] = {
        "an unexpected name": lambda: load_weights(model(), tensors(two, 32)),
        "a missing name": lambda: load_weights(model(), tensors({ESCAPE: entry()}, 16)),
        "an element type": lambda: load_weights(model(), tensors({ESCAPE: entry("F8_E8M0", (16,))}, 16)),
        "a wrong element type": lambda: load_weights(model(), tensors({"weight": entry(ESCAPE)}, 16)),
        "pieces": lambda: load_weights(model(), tensors({"__metadata__": offsets, ESCAPE: entry()}, 16)),
        "a file": lambda: load_weights(model(), forged(lambda path: (path / f"a{ESCAPE}").touch())),
        "a path": lambda: load_weights(model(), f"no{ESCAPE}"),
        "init_from": lambda: trainer(init_from=str(tensors({ESCAPE: entry()}, 16))).fit(DATA),
        "a tensor of a checkpoint": lambda: resume(forged(other_tensors)),
        "an optimizer": lambda: resume(changed('"AdamW"', '"ESCAPE"')),
        "a parameter": lambda: resume(changed('"weight"', '"ESCAPE"')),
        "a state of a callback": lambda: resume(changed('"plain"', '"ESCAPE"')),
        "a text in place of a number": lambda: resume(changed('"step": 4', '"step": "ESCAPE"')),
    }
    for name, read in cases.items():
        try:
            read()
        except CheckpointError:
            if name == list(cases)[-1]:
                raise
            sys.excepthook(*sys.exc_info())
        else:
            sys.exit(f"{name}: no error")


if __name__ == "__main__":
    main()
