"""Mixed precision in DeepSpeed's hands: the parameters themselves are 16 bits wide, and its optimizer asks for the scale."""

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
    """What DeepSpeed's optimizers ask for the loss scale. It moves as torch's GradScaler does, after the update."""

    scale: float = 1.0
    growth_interval: int = 0  # 0: it stays
    growth_tracker: int = 0  # updates without overflow since it last moved
    divide_by: float = 1.0  # what the newest gradients must be divided by beside the scale
    overflow: bool | None = None  # of the newest update

    @property
    def dynamic(self) -> bool:
        return self.growth_interval > 0

    @property
    def cur_scale(self) -> float:
        return self.scale * self.divide_by

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.scale if self.scale != 1.0 else loss

    def update_scale(self, overflow: bool) -> None:
        """DeepSpeed calls it before it divides the gradients, which is too early to move."""
        self.overflow = overflow

    def settle(self) -> None:
        """After the update."""
        if not self.dynamic:
            return
        self.growth_tracker = 0 if self.overflow else self.growth_tracker + 1
        if self.overflow:
            self.scale *= 0.5
        elif self.growth_tracker == self.growth_interval:
            self.scale, self.growth_tracker = self.scale * 2.0, 0


class EnginePrecision(Precision):
    """Autocast as long as the model is plain; its own 16 bits from `engage` to `release`."""

    def __init__(self, kind: str, device: torch.device, config: DistributedConfig) -> None:
        super().__init__(kind, device, config)
        self._kind, self._plain_autocast = kind, self.autocast
        self._start = None if self.scaler is None else self.scaler.state_dict()
        self.loss_scale = LossScale()
        if self.scaler is not None:
            self.loss_scale = LossScale(config.scaler_init_scale, config.scaler_growth_interval)
        self.scaler = None  # DeepSpeed scales
        self._hooks: list[Any] = []
        self._buffers: _Buffers | None = None

    def engage(self, model: torch.nn.Module) -> None:
        """`model` is 16 bits wide from now on, its buffers too; it takes and gives fp32."""
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
        """The model is plain again."""
        self.autocast = self._plain_autocast
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._buffers is not None:
            self._buffers.widen()
            self._buffers = None

    @contextlib.contextmanager
    def whole_buffers(self) -> Iterator[None]:
        """Within, the model's buffers are fp32; what is written to them counts. All ranks, as they may be sent."""
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
    """The fp32 buffers of a model whose parameters are 16 bits wide. DeepSpeed 0.19 leaves them as they are, and then a product
    with one is fp32 where the next layer takes 16 bits, and BatchNorm's are not of the type of its weight."""

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
        """Put 16 bits in the place of the fp32 tensors."""
        short = {id(whole): self._rounded(whole) for whole in self._whole.values()}  # one for a buffer of two modules
        for (module, name), whole in self._whole.items():
            module._buffers[name] = short[id(whole)]

    @torch.no_grad()
    def widen(self) -> None:
        """Put the fp32 tensors back. Numbers that did not change have all their bits again."""
        for (module, name), whole in self._whole.items():
            short = module._buffers[name]
            assert short is not None
            whole.copy_(torch.where(self._rounded(whole) == short, whole, short.to(whole.dtype)))
            module._buffers[name] = whole

    def _rounded(self, whole: torch.Tensor) -> torch.Tensor:
        """In 16 bits; what is finite stays so, such as the lowest number in a mask."""
        limits = torch.finfo(self._dtype)
        return torch.where(whole.isfinite(), whole.clamp(limits.min, limits.max), whole).to(self._dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with the 16 and 32 bit numbers in it as `dtype`."""
    if isinstance(value, torch.Tensor):
        is_moved = value.dtype in (torch.float32, *_DTYPES.values()) and value.dtype != dtype
        return value.to(dtype) if is_moved else value
    held = children(value)
    return value if held is None else rebuilt(value, {key: _cast(child, dtype) for key, child in held.items()})
