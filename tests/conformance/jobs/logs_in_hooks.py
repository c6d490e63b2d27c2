"""Callback that logs numbers in hooks, for everyday.py and keras_jobs/hooks.py."""

from distributed import Callback


class LogsInHooks(Callback):
    """Log another value on each rank."""

    def on_step_end(self, state, result):
        rank = self.context.worker.rank
        self.context.log("hook_mean", 10 * rank + state.step)
        self.context.log("hook_sum", rank + 1, reduce="sum")
        self.context.log("hook_max", -rank - state.step, reduce="max")
        self.context.log("hook_own", 10 * rank + state.step, on_every_rank=True)
