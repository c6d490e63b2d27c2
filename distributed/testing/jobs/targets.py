"""Resume every given checkpoint: save it again immediately, then train it to its end.

    targets.py OUT ASKED

ASKED is JSON: `model`, and `sources`, a list of [NAME, DTYPE, CHECKPOINT]. OUT/NAME/again holds the checkpoint as this
backend writes it, OUT/NAME/onward the one at the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from distributed import Trainer
from distributed.testing.jobs.cases import BASE, CUT_OFF, freeze, parts_of, resumable


def go_on(parts: Any, checkpoint: str, directory: Path, dtype: str, **settings: Any) -> None:
    """Continue the training of the suite's case "whole" from a checkpoint."""
    case = {**BASE, **resumable(parts), **settings}
    built = case.pop("model")
    del case["learning_rate"]
    trainer = Trainer(built, resume_from_checkpoint=checkpoint, checkpoint_dir=str(directory), dtype=dtype, **case)
    trainer.fit(parts.source(dtype), parts.samples(dtype))


def main(out: Path, asked: dict[str, Any]) -> None:
    parts = parts_of(asked["model"])
    for number, (name, dtype, checkpoint) in enumerate(asked["sources"]):
        go_on(parts, checkpoint, out / name / "again", dtype, max_steps=CUT_OFF)
        if number == 0:
            freeze()
        go_on(parts, checkpoint, out / name / "onward", dtype)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
