"""Train a Keras workload with our Trainer.

train --script backends_trainer_keras.py -- WORKLOAD DIRECTORY WARM_UP STEPS
"""

from __future__ import annotations

import sys

from distributed import Callback, Trainer
from distributed.state import StepResult, TrainState
from marks import Stopwatch


class Watch(Callback):
    """Report the progress of the run to the benchmark."""

    watch: Stopwatch

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        self.watch.lap()


def model_of(name: str):
    """Return a factory of the model, because the engine may have to be set up before Keras makes variables."""

    def make():
        from workloads_keras import KERAS_WORKLOADS

        return KERAS_WORKLOADS[name].initial_model()

    return make


def main(name: str, directory: str, warm_up: str, steps: str) -> None:
    from workloads_keras import KERAS_WORKLOADS, loss_fn

    workload, callback = KERAS_WORKLOADS[name], Watch()
    trainer = Trainer(
        model_of(name),
        optimizer=lambda parameters: workload.optimizer(),
        loss_fn=loss_fn(),
        gradient_clipping=workload.gradient_clipping,
        batch_size=workload.batch_size,
        shuffle=False,
        callbacks=[callback],
    )
    callback.watch = Stopwatch(directory, int(warm_up), int(steps), is_main=trainer.is_main_process)
    trainer.fit(workload.data(callback.watch.updates * workload.batch_size * trainer.plan.world_size))


if __name__ == "__main__":
    main(*sys.argv[1:])
