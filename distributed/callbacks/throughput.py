"""Log tokens per second, FLOPs per second, and model FLOPs utilization (MFU), the share of the GPUs' peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.callbacks.base import COUNTS, Callback
from distributed.errors import ConfigError

if TYPE_CHECKING:
    from distributed.state import StepResult, TrainState

# FLOPs per second of dense 16-bit matrix products with sums in fp32, by words of the name that CUDA reports. The first match counts.
# Source: the pages and data sheets under https://www.nvidia.com/en-us/data-center/ (h100, h200, a100, a40, a30, a10, l40s, l40, l4,
# grace-hopper-superchip), at half of the figures that are given "with sparsity". Compared with the tables of Lightning Fabric
# (utilities/throughput.py: H100, A100) and torchtitan (get_peak_flops: H100, H200, A100). H800 and A800 compute as H100 and A100.
PEAKS: Mapping[str, float] = {
    "GH200": 989e12, "H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12, "A800": 312e12,
    "H800": 989e12, "A40": 149.7e12, "A30": 165e12, "A10": 125e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
}  # fmt: skip
_TABLE_IS_FOR = ("bfloat16", "float16")


class ThroughputAndMFU(Callback):
    """Log the throughput of training with each log line, beside `samples_per_second`, which is always logged.

    `tokens_per_second` counts the elements of `input_ids` in a batch of named tensors. In other batches it counts the elements of
    the first tensor, if that has whole numbers and the shape [batch, time]. Padding is counted too.

    `flops_per_second` counts the FLOPs of the model's matrix products, convolutions and attention in forward and backward passes.
    Recomputed activations are not counted. The FLOPs are counted once, in the first update. They are then assumed to be
    proportional to the tokens, or to the samples if there are no tokens. `mfu` is their share of the peak of all GPUs, from 0 to 1
    (Chowdhery et al. 2022, "PaLM", appendix B). A step does not wait for the device.

    Args:
        flops_per_sample: the FLOPs of one sample, forward and backward. None means that they are counted.
        peak_flops: the peak of one GPU or of one process's CPU, in FLOPs per second. None means the value of `PEAKS` for training in 16 bits.
            Without a peak, `mfu` is not logged, and a notice says so.

    Raises:
        ConfigError: an argument is not positive. During `fit`: FLOPs cannot be counted, because `compile` hides them.
    """

    needs: ClassVar[tuple[str, ...]] = (COUNTS,)

    def __init__(self, *, flops_per_sample: float | None = None, peak_flops: float | None = None) -> None:
        for name, value in {"flops_per_sample": flops_per_sample, "peak_flops": peak_flops}.items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r} must be above 0, or None")
        self.peak_flops = peak_flops
        self._per_sample, self._per_token = flops_per_sample or 0.0, 0.0
        self._peak: float | None = None
        self._is_counting = False

    def on_train_start(self, state: TrainState) -> None:
        context = self.context
        self._is_counting = not self._per_sample
        if context.config.compile and self._is_counting:
            raise ConfigError(
                "ThroughputAndMFU cannot count the FLOPs of a model with compile=True: pass flops_per_sample=..., which a run of a few"
                " steps without compile shows"
            )
        context.observer.count_updates(counts_flops=self._is_counting)
        self._peak = self.peak_flops or self._known_peak()

    def _known_peak(self) -> float | None:
        """Return the peak of this kind of GPU, or show a notice that says why there is none."""
        observer = self.context.observer
        name, kind = observer.device_name, observer.computes_in
        peak = peak_of(name)
        if peak is not None and kind in _TABLE_IS_FOR:
            return peak
        what = f"{kind} on {name}" if name else "CPUs"
        self.context.notice(
            f"no mfu is logged: the peak of {what} is not known; ThroughputAndMFU(peak_flops=...) gives it"
        )
        return None

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        context = self.context
        counted = context.observer.counted
        if self._is_counting:
            self._is_counting = False
            self._per_sample, self._per_token = counted.flops_per_sample, counted.flops_per_token
            per_update = self._per_sample * result.num_samples
            context.notice(f"the model needs {self._per_sample:.4g} FLOPs per sample, {per_update:.4g} per update")
        if counted.num_tokens:
            context.log_rate("tokens_per_second", counted.num_tokens)
        has_tokens = bool(counted.num_tokens and self._per_token)
        flops = counted.num_tokens * self._per_token if has_tokens else counted.num_samples * self._per_sample
        context.log_rate("flops_per_second", flops)
        if self._peak is not None:
            context.log_rate("mfu", flops / (self._peak * context.worker.world_size))

    def state_dict(self) -> dict[str, Any]:
        return {"per_sample": self._per_sample, "per_token": self._per_token}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._per_sample:  # given by the user
            self._per_sample, self._per_token = state["per_sample"], state["per_token"]


def peak_of(device_name: str) -> float | None:
    """Return the peak of the GPU in `PEAKS`, or None if it is not there. A part of a GPU (MIG) has none."""
    words = set(device_name.replace("-", " ").split())
    known = (value for name, value in PEAKS.items() if words.issuperset(name.split()))
    return None if "MIG" in words else next(known, None)
