"""Callbacks that ask the loop for something in their hooks."""

import json
import os

from distributed import Callback

EVALUATED_AT, SAVE_AFTER, FURTHER = (2, 5), 3, 40


def is_last(context):
    """Return whether this process is the last rank."""
    return context.worker.rank == context.worker.world_size - 1


class StopsAfterThree(Callback):
    """Ask to stop on the last rank after validations or checkpoints at three steps, however long they take to become due.

    On a busy machine, the clock of `checkpoint_every_s` may ask twice at one step.
    """

    def __init__(self):
        self.steps = set()

    def on_validation_end(self, state, metrics):
        self._add(state.step)

    def on_checkpoint(self, state, path):
        self._add(state.step)

    def _add(self, step):
        before = len(self.steps)
        self.steps.add(step)
        if before < 3 == len(self.steps) and is_last(self.context):
            self.context.stop("asked after three")


class Evaluates(Callback):
    """Evaluate data after some updates."""

    def __init__(self, data):
        self.data, self.evaluated = data, []

    def on_step_end(self, state, result):
        if state.step in EVALUATED_AT:
            self.evaluated.append(self.context.evaluate(self.data))


class AsksToSave(Callback):
    """Ask for a checkpoint on the last rank, and to stop some updates after it was saved."""

    def __init__(self):
        self.saved, self.stop_at = [], None

    def on_step_end(self, state, result):
        if not is_last(self.context):
            return
        if state.step == SAVE_AFTER:
            self.context.save()
        if state.step == self.stop_at:
            self.context.stop("saved")

    def on_checkpoint(self, state, path):
        self.saved.append([state.step, path.name])
        self.stop_at = self.stop_at or state.step + FURTHER


def write(out, case, history, **facts):
    """Write what this rank has seen to OUT/CASE-RANK.json."""
    facts |= {
        "steps": history.steps,
        "stop_reason": history.stop_reason,
        "rows_at": [row["step"] for row in history.rows],
    }
    (out / f"{case}-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(facts))
