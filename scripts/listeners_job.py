"""Trains a small model for six updates, and waits after the second and the fourth until a file allows it to go on.

    listeners_job.py MODEL DIRECTORY [SETTING=VALUE ...]

MODEL is `torch` or `keras`. Each rank leaves `at-STEP-RANK.json` in DIRECTORY, with the ports that it knows by their names, and
waits for `go-STEP`. Settings are given to the Trainer, for a start as a plain script.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from distributed import Callback, Trainer

MODEL, DIRECTORY, SETTINGS = sys.argv[1], Path(sys.argv[2]), dict(word.split("=") for word in sys.argv[3:])
PAUSES = (2, 4)


class Pause(Callback):
    """Says that this rank has come so far, and waits."""

    def on_step_end(self, state: Any, result: Any) -> None:
        if state.step not in PAUSES:
            return
        rank = int(os.environ.get("RANK", 0))
        staged = DIRECTORY / f".at-{state.step}-{rank}"
        staged.write_text(json.dumps({"pid": os.getpid(), "rank": rank, "ports": ports(rank)}))
        staged.rename(DIRECTORY / f"at-{state.step}-{rank}.json")
        while not (DIRECTORY / f"go-{state.step}").exists():
            time.sleep(0.02)


def ports(rank: int) -> dict[str, int]:
    """Of the services that this rank was told of."""
    found = {}
    if "MASTER_PORT" in os.environ:
        found["TCPStore"] = int(os.environ["MASTER_PORT"])
    if "HOROVOD_GLOO_RENDEZVOUS_PORT" in os.environ:
        found["Horovod's rendezvous"] = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    if "TF_CONFIG" in os.environ:
        workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
        found["TensorFlow's gRPC"] = int(workers[rank].rpartition(":")[2])
    return found


def main() -> None:
    model, data = importlib.import_module(f"distributed.testing.jobs.{MODEL}_parts").short()
    settings: dict[str, Any] = {name: int(value) if value.isdecimal() else value for name, value in SETTINGS.items()}
    trainer = Trainer(
        model, callbacks=[Pause()], global_batch_size=8, max_steps=6, epochs=2, checkpoint_every_n_steps=4, **settings
    )
    trainer.fit(data)


if __name__ == "__main__":
    main()
