"""Run mixed precision with DeepSpeed: the parameters themselves have 16 bits, and DeepSpeed's optimizer reads the loss
scale from our `LossScale`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from distributed.backends._torch.nested import children, rebuilt
from distributed.backends._torch.precision import MIN_LOSS_SCALE, Precision
from distributed.config.settings import DistributedConfig

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass
class LossScale:
    """Loss scale that DeepSpeed's optimizers use. It changes after an update, as in torch's GradScaler."""

    scale: float = 1.0
    growth_interval: int = 0  # 0 means a constant scale
    growth_tracker: int = 0  # updates without overflow since the scale last changed
    divide_by: float = 1.0  # additional divisor of the newest gradients
    overflow: bool | None = None  # whether the newest update overflowed

    @property
    def dynamic(self) -> bool:
        return self.growth_interval > 0

    @property
    def cur_scale(self) -> float:
        return self.scale * self.divide_by

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.scale if self.scale != 1.0 else loss

    def update_scale(self, overflow: bool) -> None:
        """Record an overflow. DeepSpeed calls this before it divides the gradients, so the scale must not change
        yet."""
        self.overflow = overflow

    def settle(self) -> None:
        """Change the scale after the update."""
        if not self.dynamic:
            return
        self.growth_tracker = 0 if self.overflow else self.growth_tracker + 1
        if self.overflow:
            self.scale *= 0.5
        elif self.growth_tracker == self.growth_interval:
            self.scale, self.growth_tracker = self.scale * 2.0, 0


class EnginePrecision(Precision):
    """Use autocast while the model is plain, and 16-bit parameters between `engage` and `release`."""

    def __init__(self, kind: str, device: torch.device, config: DistributedConfig) -> None:
        super().__init__(kind, device, config)
        self._kind, self._plain_autocast = kind, self.autocast
        self._start = None if self.scaler is None else self.scaler.state_dict()
        self.loss_scale = LossScale()
        if self.scaler is not None:
            self.loss_scale = LossScale(config.scaler_init_scale, config.scaler_growth_interval)
        self.scaler = None  # unused, because DeepSpeed scales the loss
        self._hooks: list[Any] = []
        self._buffers: _Buffers | None = None

    def engage(self, model: torch.nn.Module) -> None:
        """Adapt to `model`, whose parameters now have 16 bits: convert its buffers and inputs to 16 bits, and its
        outputs to fp32."""
        if self._kind == "no":
            return
        self.autocast = contextlib.nullcontext
        dtype = _DTYPES[self._kind]
        self._buffers = _Buffers(model, dtype)
        self._hooks = [
            model.register_forward_pre_hook(
                lambda module, args, kwargs: (_cast(args, dtype), _cast(kwargs, dtype)), with_kwargs=True
            ),
            model.register_forward_hook(lambda module, args, outputs: _cast(outputs, torch.float32)),
        ]

    def release(self) -> None:
        """Use autocast again, because the model is plain again."""
        self.autocast = self._plain_autocast
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._buffers is not None:
            self._buffers.widen()
            self._buffers = None

    @contextlib.contextmanager
    def whole_buffers(self) -> Iterator[None]:
        """Make the model's buffers fp32 within the block, and keep the changes that the block makes to them. All ranks
        call it, because the block may communicate buffers."""
        if self._buffers is None:
            yield
            return
        self._buffers.widen()
        try:
            yield
        finally:
            self._buffers.narrow()

    @property
    def leaves_out(self) -> bool:
        return True

    def may_overflow(self) -> bool:
        return self.loss_scale.dynamic and self.loss_scale.scale > MIN_LOSS_SCALE

    def state(self) -> dict[str, Any] | None:
        if self._start is None:
            return None
        return {**self._start, "scale": self.loss_scale.scale, "_growth_tracker": self.loss_scale.growth_tracker}

    def load(self, state: Mapping[str, Any] | None) -> None:
        if self._start is not None and state:
            self.loss_scale.scale = float(state["scale"])
            self.loss_scale.growth_tracker = int(state["_growth_tracker"])


class _Buffers:
    """The fp32 buffers of a model whose parameters have 16 bits.

    Workaround (DeepSpeed 0.19.8, no upstream issue known; may go when DeepSpeed converts buffers too): DeepSpeed leaves
    buffers in fp32. A product with one is then fp32 although the next layer takes 16 bits, and buffers of BatchNorm
    differ in type from its weight.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._whole = {
            (module, name): buffer
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.dtype == torch.float32
        }
        self.narrow()

    def narrow(self) -> None:
        """Replace the fp32 tensors by 16-bit ones."""
        # a buffer shared by two modules is converted once
        short = {id(whole): self._rounded(whole) for whole in self._whole.values()}
        for (module, name), whole in self._whole.items():
            module._buffers[name] = short[id(whole)]

    @torch.no_grad()
    def widen(self) -> None:
        """Restore the fp32 tensors. Values that did not change in 16 bits get all their bits back."""
        for (module, name), whole in self._whole.items():
            short = module._buffers[name]
            assert short is not None
            whole.copy_(torch.where(self._rounded(whole) == short, whole, short.to(whole.dtype)))
            module._buffers[name] = whole

    def _rounded(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the tensor in 16 bits. Finite numbers stay finite, for example the lowest fp32 number in a mask."""
        limits = torch.finfo(self._dtype)
        return torch.where(whole.isfinite(), whole.clamp(limits.min, limits.max), whole).to(self._dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with its 16-bit and 32-bit floats converted to `dtype`."""
    if isinstance(value, torch.Tensor):
        is_moved = value.dtype in (torch.float32, *_DTYPES.values()) and value.dtype != dtype
        return value.to(dtype) if is_moved else value
    held = children(value)
    return value if held is None else rebuilt(value, {key: _cast(child, dtype) for key, child in held.items()})
