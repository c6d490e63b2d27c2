"""Make one update of a torch optimizer from the gradients of all ranks: rescale, clip, check for NaN, step."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from distributed.backends._torch.lookback import Unread
from distributed.backends._torch.nested import rows_not_finite
from distributed.backends.non_finite import NanPolicy, describe, votes_of
from distributed.state import StepResult, UpdateBatch

if TYPE_CHECKING:
    import torch

    from distributed.backends._torch.objective import Loss
    from distributed.backends._torch.precision import Precision
    from distributed.backends._torch.schedule import Schedule
    from distributed.backends.torch_base import TorchBackend


class Update:
    """Make the updates of a fit, with the rates that schedule and warm-up set."""

    def __init__(
        self,
        backend: TorchBackend[Any],
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        precision: Precision | None = None,
    ) -> None:
        """Prepare the updates. `precision` is that of the backend, if it is not given."""
        self._backend, self.optimizer, self.schedule = backend, optimizer, schedule
        self._precision, self._config = precision or backend.precision, backend.config
        self._label = ""  # begins a message about an update
        self.step = 0  # number of updates made so far, for warm-up and messages
        self.parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._gradients = backend.wrapper.make_gradients(self.parameters)
        self._nan_policy = NanPolicy(self._config.nan_policy, backend.on_event)
        self._apply_gradients = self._precision.updating(optimizer)
        self._clipped_norm: torch.Tensor | None = None  # norm of the newest update before clipping
        self._unread: Unread | None = None  # the newest update, until its gradients have been checked
        self._looks_later = self._may_look_later()

    def finish(self, update_batch: UpdateBatch, losses: list[Loss], result: StepResult) -> None:
        """Make the update of `update_batch`. All ranks must call it.

        The update is skipped if its gradients are not finite and `nan_policy` selects that.
        """
        self._make_ready(update_batch, losses, result)
        if result.skipped:
            self._precision.leave_out()
        else:
            with self._warming_up():
                is_made = self._apply()
            if not is_made:
                self._on_non_finite(update_batch, losses, result)
            if self.schedule.follows_updates and not result.skipped:
                self.schedule.step()
        self.step += 1

    def look_back(self) -> None:
        """Check the newest update and apply `nan_policy`, if that has not been done yet. All ranks must call it."""
        unread, self._unread = self._unread, None
        if unread is not None and unread.is_bad():
            self._on_non_finite(
                unread.update_batch, unread.losses, StepResult([], unread.update_batch.num_samples), is_late=True
            )

    def resume(self, step: int) -> None:
        """Continue after `step` updates."""
        self.step = step

    def forget(self) -> None:
        """Drop the newest update's pending check."""
        self._unread = None

    def gradient_norm(self) -> float | None:
        """Return the global norm of the newest update's gradients before clipping. All ranks must call it."""
        return self._gradients.norm() if self._clipped_norm is None else float(self._clipped_norm)

    def rates(self) -> list[float]:
        """Return the rate of each parameter group for the next update."""
        return self.schedule.rates(self.step)

    # ------------------------------------------------------------------ the parts of an update

    def _make_ready(self, update_batch: UpdateBatch, losses: list[Loss], result: StepResult) -> None:
        """Unscale, rescale and clip the gradients, and check them for NaN."""
        self._precision.unscale(self.optimizer)
        for hook in self._backend.before_update:
            hook()
        gradients = self._gradients.views()
        total = self._backend.passes.take_total()
        if total is not None:
            self._gradients.rescale(gradients, update_batch.num_samples / total)
        if self._config.gradient_clipping is not None:
            self._clipped_norm = self._gradients.clip(gradients, self._config.gradient_clipping)
        if self._looks_later:
            self.look_back()
            self._unread = self._unread_of(gradients, update_batch, losses)
        elif not self._are_finite(gradients) or self._has_dropped_overflow():
            self._on_non_finite(update_batch, losses, result)

    def _apply(self) -> bool:
        """Make the optimizer step. Return whether the gradients were finite, for an engine that finds out only here."""
        self._apply_gradients()
        return True

    def _may_look_later(self) -> bool:
        """Return whether the check of the gradients can wait until the next update.

        This holds if the device works in the meantime and no update is ever skipped.
        """
        is_on_gpu = self._gradients.device.type == "cuda"
        return is_on_gpu and not self._precision.leaves_out and self._config.nan_policy != "skip"

    def _are_finite(self, gradients: list[torch.Tensor]) -> bool:
        if self._clipped_norm is not None:
            return math.isfinite(self._clipped_norm.item())
        return self._gradients.are_finite(gradients)

    def _has_dropped_overflow(self) -> bool:
        """Return whether the scaler has found a gradient that is not finite and that a hook has dropped since."""
        return bool(self._backend.before_update) and self._precision.has_found_overflow(self.optimizer)

    def _unread_of(self, gradients: list[torch.Tensor], update_batch: UpdateBatch, losses: list[Loss]) -> Unread:
        norm = self._clipped_norm  # norm - norm is 0, or NaN if the norm is not finite
        bad = self._gradients.non_finite(gradients) if norm is None else (norm - norm)
        return Unread.of(bad, update_batch, losses)

    def _warming_up(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the rates are those of the coming update."""
        is_warm = self.step >= self._config.warmup_steps
        return contextlib.nullcontext() if is_warm else self.schedule.warming_up(self.step)

    def _on_non_finite(
        self, update_batch: UpdateBatch, losses: list[Loss], result: StepResult, *, is_late: bool = False
    ) -> None:
        """Apply `nan_policy`.

        All ranks call it together, because the synchronised gradients are the same on every rank.

        `is_late` says that the update has been made already and is the newest one.
        """
        self._judge(update_batch, losses, result, is_late)
        self._backend.wrapper.after_non_finite()

    def _judge(self, update_batch: UpdateBatch, losses: list[Loss], result: StepResult, is_late: bool) -> None:
        values = [float(loss.value.detach()) for loss in losses]
        votes = votes_of(self._backend.world, values)
        if not any(votes.values()) and self._precision.may_overflow():
            result.skipped = True  # make the scaler lower its scale
            return
        step = self.step - is_late

        def description() -> str:
            return self._label + describe(self._backend.world, step + 1, update_batch, votes, values, rows_not_finite)

        self._nan_policy.apply(step, description, result, can_be_made=not self._precision.leaves_out, is_late=is_late)
