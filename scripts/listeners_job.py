"""Train a small model twice, and wait in the middle of the second training until a file allows it to continue.

    listeners_job.py MODEL DIRECTORY [SETTING=VALUE ...]

MODEL is `torch` or `keras`. While it waits, each rank has written `at-RANK.json` to DIRECTORY, with the names of the
ports that it knows. It waits for the file `go`. The trained weights are in `weights-1.safetensors` and
`weights-2.safetensors`. Settings are passed to the Trainer; a start as a plain script needs them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from distributed import Callback, Trainer

MODEL, DIRECTORY, SETTINGS = sys.argv[1], Path(sys.argv[2]), dict(word.split("=") for word in sys.argv[3:])


@dataclasses.dataclass
class Pause(Callback):
    """Report that this rank has come to its pause, and wait."""

    directory: Path

    def on_step_end(self, state: Any, result: Any) -> None:
        if state.step != 2:
            return
        rank = int(os.environ.get("RANK", 0))
        staged = self.directory / f".at-{rank}"
        staged.write_text(json.dumps({"pid": os.getpid(), "rank": rank, "ports": ports(rank)}))
        staged.rename(self.directory / f"at-{rank}.json")
        while not (self.directory / "go").exists():
            time.sleep(0.02)


def ports(rank: int) -> dict[str, int]:
    """Return the ports of services that the environment of this rank names."""
    found = {}
    if "MASTER_PORT" in os.environ:
        found["TCPStore"] = int(os.environ["MASTER_PORT"])
    if "HOROVOD_GLOO_RENDEZVOUS_PORT" in os.environ:
        found["Horovod's rendezvous"] = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    if "TF_CONFIG" in os.environ:
        workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
        found["TensorFlow's gRPC"] = int(workers[rank].rpartition(":")[2])
    return found


def train(number: int) -> None:
    """Train the model. Both trainings are identical."""
    make, data = importlib.import_module(f"distributed.testing.jobs.{MODEL}_parts").short()
    settings: dict[str, Any] = {name: int(value) if value.isdecimal() else value for name, value in SETTINGS.items()}

    def seeded() -> Any:
        if MODEL == "torch":
            importlib.import_module("torch").manual_seed(7)
        else:
            keras = importlib.import_module("keras")
            keras.backend.clear_session()  # reset the numbers in layer names, which are stored
            keras.utils.set_random_seed(7)
        return make()

    trainer = Trainer(seeded, callbacks=[Pause(DIRECTORY)] if number == 2 else [], global_batch_size=8, **settings)
    trainer.fit(data)
    trainer.save(DIRECTORY / f"weights-{number}.safetensors")


if __name__ == "__main__":
    for each in (1, 2):
        train(each)
