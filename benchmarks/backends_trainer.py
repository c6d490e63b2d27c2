"""Train a workload with our Trainer on any torch backend.

train --script backends_trainer.py -- WORKLOAD DIRECTORY WARM_UP STEPS
"""

from __future__ import annotations

import sys

from torch.utils.data import DataLoader

from distributed import Callback, Trainer
from distributed.state import StepResult, TrainState
from marks import Stopwatch
from workloads import WORKLOADS


class Watch(Callback):
    """Report the progress of the run to the benchmark."""

    watch: Stopwatch

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        self.watch.lap()


def main(name: str, directory: str, warm_up: str, steps: str) -> None:
    workload, callback = WORKLOADS[name], Watch()
    trainer = Trainer(
        workload.initial_model,
        optimizer=workload.optimizer,
        loss_fn=workload.loss_fn,
        gradient_clipping=workload.gradient_clipping,
        callbacks=[callback],
    )
    callback.watch = Stopwatch(directory, int(warm_up), int(steps), is_main=trainer.is_main_process)
    data = workload.data(callback.watch.updates * workload.batch_size * trainer.plan.world_size)
    trainer.fit(DataLoader(data, batch_size=workload.batch_size))


if __name__ == "__main__":
    main(*sys.argv[1:])
