"""Wrap a plain model and optimizer in DeepSpeed's engine, and unwrap both."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from distributed.backends._deepspeed.held_slots import HeldSlots
from distributed.backends._deepspeed.partitions import Partitions, iterate, stand_in, with_whole
from distributed.backends._deepspeed.precision import LossScale
from distributed.backends._torch.tensors import named_parameters, saves_its_parameters
from distributed.backends._torch.world import TorchWorld
from distributed.errors import ConfigError

# These optimizers update each element of a parameter independently, so a parameter may be cut at any element.
_ELEMENTWISE = ("Adam", "AdamW", "SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD")


def check(model: torch.nn.Module, optimizer: torch.optim.Optimizer, stage: int, *, allows_any: bool) -> None:
    """Raise ConfigError for a model or optimizer that `stage`, 1 to 3, cannot partition."""
    kind = type(optimizer).__name__
    is_known = type(optimizer).__module__.startswith("torch.optim") and kind in _ELEMENTWISE
    if not is_known and not allows_any:
        raise ConfigError(
            f"the optimizer {kind} may need more of a parameter than the shard that ZeRO gives it: use"
            f" {', '.join(_ELEMENTWISE[:3])}, or set zero_allow_untested_optimizer=true in deepspeed_config if it does not"
        )
    kinds = sorted({str(p.dtype) for p in model.parameters() if p.requires_grad and p.dtype != torch.float32})
    if kinds:
        raise ConfigError(
            f"the model has trainable parameters of {' and '.join(kinds)}, but ZeRO keeps them in float32: build the model in"
            " float32, with mixed_precision='bf16' for 16 bits in the forward pass"
        )
    if name := next(
        (name for name, p in model.named_parameters() if not p.numel() and (p.requires_grad or stage == 3)), ""
    ):
        raise ConfigError(
            f"{name} has no elements, and DeepSpeed cannot cut it: remove it, or use backend='pytorch-ddp'"
        )
    for number, group in enumerate(optimizer.param_groups):
        if not any(p.requires_grad for p in group["params"]):
            raise ConfigError(
                f"parameter group {number} of the optimizer has no trainable parameter: remove that group"
            )


@contextlib.contextmanager
def _local_rank_set(local_rank: int) -> Iterator[None]:
    """Set LOCAL_RANK inside the block. In a process that no launcher started it stays unset outside, because it says
    that the process is a worker.

    Workaround (DeepSpeed 0.19.8, deepspeedai/DeepSpeed#1682; may go when `initialize` works without the variable).
    """
    if is_unset := "LOCAL_RANK" not in os.environ:
        os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        yield
    finally:
        if is_unset:
            del os.environ["LOCAL_RANK"]


class Engine:
    """Wrap `model` and `optimizer` with DeepSpeed, from the first update of a fit to its end.

    Stages 1 to 3 change both in place: the optimizer updates flat fp32 partitions, and at stage 3 the model's
    parameters are empty except while they are used. All ranks must call every method. `abandon` does not communicate.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Mapping[str, Any],
        world: TorchWorld,
        loss_scale: LossScale,
        previous: Engine | None = None,
        held: HeldSlots | None = None,
    ) -> None:
        """Wrap the model and the optimizer.

        Args:
            config: DeepSpeed's complete config.
            previous: the released engine of an earlier fit, which has the optimizer's state.
            held: tensors of the optimizer's state that it lacks itself.
        """
        import deepspeed
        import pydantic  # installed with deepspeed, which requires it

        self.model, self.optimizer, self._world = model, optimizer, world
        self.stage = int(config["zero_optimization"]["stage"])
        self.is_released = False
        self.groups = [dict(group) for group in optimizer.param_groups]
        self._own = _Attributes(model)
        has_halves = any(config.get(kind, {}).get("enabled") for kind in ("bf16", "fp16"))
        weights = {p: p.detach().clone() for p in iterate(self.groups)} if has_halves else {}
        state = {parameter: dict(slots) for parameter, slots in optimizer.state.items()}
        for parameter, slot, value in held or ():
            state.setdefault(parameter, {})[slot] = value
        if self.stage:
            optimizer.state.clear()
        try:
            with _local_rank_set(world.context.local_rank):
                self.wrapper, self.zero, _, _ = deepspeed.initialize(
                    model=model, optimizer=optimizer, config=dict(config)
                )
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"deepspeed_config: DeepSpeed does not accept {where}={first['input']!r} ({first['msg']}): correct it"
            ) from None
        self._own.record()
        self.wrapper.set_gradient_accumulation_boundary(True)
        if not self.stage:
            # keep the gradients after an update, because the log may need their norm; the next step zeroes them
            self.wrapper.zero_grad = lambda: None
            return
        self._own_scaler = self.zero.loss_scaler
        self.zero.loss_scaler = self._scale = loss_scale
        self.partitions = Partitions(self.zero, list(iterate(self.groups)), self.stage, world)
        self.partitions.set_whole(weights)
        if previous is not None:
            self.partitions.take_over(optimizer, previous.partitions, state)
        else:
            self.partitions.set_state(optimizer, state, {p: name for name, p in named_parameters(model)})

    # ------------------------------------------------------------------ in training

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate the gradients of the backward passes within the block. The last pass of an update runs outside."""
        self.wrapper.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.wrapper.set_gradient_accumulation_boundary(True)

    def step(self, divide_by: float) -> bool:
        """Make one update at stages 1 to 3: divide the gradients by `divide_by`, clip them and apply them.

        Return False if a gradient is not finite or `divide_by` is zero. In that case no rank makes an update.
        """
        if divide_by == 0.0:  # no sample counted in this update
            return self._leave_out()
        self._scale.divide_by = divide_by
        self.wrapper.step()
        self._scale.divide_by = 1.0
        self._scale.settle()
        return bool(self.wrapper.was_step_applied())

    def _leave_out(self) -> bool:
        """Make DeepSpeed drop the gradients.

        Workaround (DeepSpeed 0.19.8, no upstream issue known; may go when an engine can leave an update out): report
        the norm that DeepSpeed uses for gradients that are not finite.
        """
        bad = torch.tensor(-1.0)
        name, value = ("_get_norm_groups", [bad]) if self.stage == 3 else ("scaled_global_norm", bad)
        setattr(self.zero, name, lambda: value)
        self.wrapper.step()
        delattr(self.zero, name)
        return False

    def gradient_norm(self) -> float | None:
        """Return the gradient norm of the newest update before clipping, at stages 1 to 3."""
        norm = self.wrapper.get_global_grad_norm()
        if norm is None:
            return None
        return float(norm) if math.isfinite(norm) else math.nan  # DeepSpeed reports infinity for NaN too

    # ------------------------------------------------------------------ whole tensors

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Make the model's parameters whole and fp32 on the main process within the block."""
        before = {p: p.data for p in self.model.parameters()}
        try:
            for parameter, full in self._weights():
                if self._world.context.is_main_process:
                    parameter.data = full.cpu()
            yield
        finally:
            for parameter, data in before.items():
                parameter.data = data

    def _weights(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield every partitioned or 16-bit parameter with its whole fp32 tensor. A collective: all ranks must
        exhaust it."""
        if self.is_released or not self.stage:
            return
        for parameter in iterate(self.groups):
            yield parameter, self.partitions.whole(parameter)
        yield from self._frozen()

    def _frozen(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield every frozen parameter that is partitioned or has 16 bits, with its whole fp32 tensor. A collective as `_weights`."""
        trained = set(iterate(self.groups))
        for parameter in self.model.parameters():
            if parameter in trained:
                continue
            if hasattr(parameter, "ds_id"):
                yield parameter, _gathered(parameter)
            elif parameter.dtype in (torch.bfloat16, torch.float16):
                yield parameter, parameter.detach().float()

    @contextlib.contextmanager
    def in_pieces(self) -> Iterator[torch.optim.Optimizer]:
        """Yield the optimizer in the form in which each rank saves its pieces.

        Within the block, the model's parameters are fp32 and have their whole shapes. A partitioned tensor is a stand-in, and
        `sharding.write` writes this rank's pieces of it. A frozen parameter is whole on the main process, and so are all others if the
        model makes other tensors from them for its state. A collective.
        """
        if not self.stage:
            yield self.optimizer
            return
        stand_ins, before = self.partitions.stand_ins, {p: p.data for p in self.model.parameters()}
        optimizer = stand_in(self.optimizer, self.groups, self.partitions.state(self.optimizer))
        try:
            is_cut = not self.is_released and saves_its_parameters(self.model)
            if is_cut:
                for parameter, value in self.partitions.weights().items():
                    stand_ins.set_data(parameter, value)
            for parameter, value in self._frozen() if is_cut else self._weights():
                if self._world.context.is_main_process:
                    parameter.data = value.cpu()
            with stand_ins.written():
                yield optimizer
        finally:
            stand_ins.forget(before)
            for parameter, data in before.items():
                parameter.data = data

    def save_own_files(self, directory: Path, step: int) -> None:
        """Write DeepSpeed's own checkpoint at stages 1 to 3. Each rank writes its part. A rank whose disk fails raises
        OSError."""
        from distributed.backends._deepspeed import own_files

        self._own_scaler.cur_scale = self._scale.scale
        # DeepSpeed pickles the loss scaler, and its tools could not import our class.
        self.zero.loss_scaler = self._own_scaler
        try:
            own_files.save(self.wrapper, directory, step, is_main=self._world.context.is_main_process)
        finally:
            self.zero.loss_scaler = self._scale

    # ------------------------------------------------------------------ the end

    def release(self, home: torch.device) -> None:
        """Give the model whole fp32 parameters on the device `home`. The optimizer's state stays partitioned, for
        the next engine."""
        weights = {parameter: full.to(home) for parameter, full in self._weights()}
        self.abandon()
        for parameter, full in weights.items():
            parameter.data = full

    def abandon(self) -> None:
        """Remove DeepSpeed's hooks without communication. At stage 3 the model's parameters stay empty."""
        if self.is_released:
            return
        self.is_released = True
        self.wrapper.destroy()
        for hook in (self.wrapper.module_forward_pre_hook, self.wrapper.module_forward_post_hook):
            hook.remove()
        self._own.restore()
        self.optimizer.param_groups = with_whole(self.optimizer, self.groups)
        del self.wrapper, self.zero


def _gathered(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a frozen parameter of stage 3 as a whole fp32 tensor."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().to(torch.float32, copy=True)


class _Attributes:
    """Attributes of a model's modules and parameters, to remove the ones that DeepSpeed adds.

    Workaround (DeepSpeed 0.19.8, deepspeedai/DeepSpeed#7204; may go when `destroy` leaves none of them behind).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._each = [*model.modules(), *model.parameters()]
        self._before = [set(vars(each)) for each in self._each]
        self._foreign: list[set[str]] = []
        self._parameters = [(module, module._parameters) for module in model.modules()]

    def record(self) -> None:
        """Record the attributes that DeepSpeed has added."""
        self._foreign = [set(vars(each)) - before for each, before in zip(self._each, self._before, strict=True)]

    def restore(self) -> None:
        """Remove the recorded attributes, and those with DeepSpeed's prefixes that were added during training."""
        for each, before, foreign in zip(self._each, self._before, self._foreign, strict=True):
            for name in vars(each).keys() - before:
                if name in foreign or name.startswith(("ds_", "_ds_")):
                    delattr(each, name)
        for module, parameters in self._parameters:
            module._parameters = parameters
