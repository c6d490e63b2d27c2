"""Train four updates and save a checkpoint. Optionally a rank fails in between.

short.py MODEL [raise|kill]
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import Any

from distributed import Callback, Trainer

KIND = sys.argv[2] if len(sys.argv) > 2 else ""
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Fault(Callback):
    """Fail on the last rank after the second update."""

    def on_step_end(self, state: Any, result: Any) -> None:
        if state.step != 2 or RANK != WORLD - 1:
            return
        if KIND == "raise":
            raise ValueError("this rank has had enough")
        if KIND == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    model, data = importlib.import_module(f"distributed.testing.jobs.{sys.argv[1]}_parts").short()
    trainer = Trainer(model, callbacks=[Fault()], global_batch_size=8)
    trainer.fit(data)
    if trainer.is_main_process:
        sys.stdout.write("came to its end\n")


if __name__ == "__main__":
    main()
