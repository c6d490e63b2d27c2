"""Parts of the suite's cases for torch modules. keras_parts.py has the same names."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from distributed.testing.jobs import overall

SAMPLES, FEATURES, CLASSES = 101, 12, 5  # 101 is divisible by none of 2, 3 and 4
RATE = 1e-2
_ELEMENTS = {"float64": torch.float64, "float32": torch.float32}
_WEIGHTS = (1.0, 5.0, 0.5, 2.0, 1.5)  # weight of each class in the weighted case


# ------------------------------------------------------------------ data


def samples(dtype: str, kind: str = "", sign: int = 1) -> TensorDataset:
    """Return inputs and classes. With kind `ignored` the first 60 targets are ignored, so that whole slices of an
    update have none left."""
    generator = torch.Generator().manual_seed(7)
    x = sign * torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64).to(_ELEMENTS[dtype])
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    y[: 60 if kind == "ignored" else 0] = -100
    return TensorDataset(x, y)


def classes(dtype: str) -> Any:
    """Return the targets of `samples`."""
    return samples(dtype).tensors[1].numpy()


def source(dtype: str, kind: str = "") -> Any:
    """Return the training data. Kind `stream` is an iterable data set of the same samples."""
    return Stream(dtype) if kind == "stream" else DataLoader(samples(dtype, kind), batch_size=1, shuffle=True)


class Stream(IterableDataset[Any]):
    """Iterable data set without a length."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def __iter__(self) -> Iterator[Any]:
        data = samples(self.dtype)
        yield from (data[i] for i in range(SAMPLES))


def numbers(outputs: Any) -> numpy.ndarray[Any, Any]:
    """Return predictions as float64."""
    array: numpy.ndarray[Any, Any] = outputs.double().numpy()
    return array


# ------------------------------------------------------------------ models


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES))


def smooth() -> torch.nn.Module:
    """Return a net without ReLU, whose corner makes results depend on rounding."""
    inner = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
    first = torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.Tanh())
    return torch.nn.Sequential(first, inner, torch.nn.Linear(16, CLASSES))


class _Counted(torch.nn.Tanh):
    """Layer that counts its forward passes with gradients enabled."""

    forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _Counted.forwards += torch.is_grad_enabled()
        return super().forward(x)


def counted() -> torch.nn.Module:
    """Return a net with blocks that can be recomputed and that count their forward passes."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(16, 16), _Counted()) for _ in range(2)]
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), *blocks, torch.nn.Linear(16, CLASSES))


def same_weights() -> torch.nn.Module:
    """Return a net with the same weights in every run, whatever its seed."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return smooth()


# ------------------------------------------------------------------ several models


def several() -> dict[str, Any]:
    """Return the arguments of a classifier, a critic of its outputs, and a teacher that is not trained."""
    models = {"net": smooth, "critic": lambda: torch.nn.Linear(CLASSES, 1), "teacher": model}
    return {
        "models": models, "optimizers": {"net": adamw, "critic": sgd}, "schedulers": {"net": cosine},
        "training_step": _adversarial,
    }  # fmt: skip


def _adversarial(models: Any, batch: Any, update: Any) -> dict[str, Any]:
    x, y = batch
    outputs = models["net"](x)
    odd = (y % 2).to(outputs.dtype).unsqueeze(1)
    update("critic", (models["critic"](outputs.detach()) - odd).square().mean())
    loss = torch.nn.functional.cross_entropy(outputs, y) - 0.1 * (models["critic"](outputs) - odd).square().mean()
    update("net", loss + 0.1 * (outputs - models["teacher"](x)).square().mean())
    return {"accuracy": ((outputs.argmax(1) == y).sum(), len(y))}


def predicted_by_several(models: Any, data: TensorDataset) -> torch.Tensor:
    """Return the outputs of the classifier for all samples."""
    device = next(models.parameters()).device
    models.eval()
    with torch.no_grad():
        outputs: torch.Tensor = models["net"](data.tensors[0].to(device)).cpu()
    return outputs


def sampled(model: torch.nn.Module, prompts: list[str]) -> list[str]:
    """Return the sum of the outputs for random inputs, for `SampleText`."""
    like = next(model.parameters())
    inputs = torch.randn(4, FEATURES, dtype=torch.float64).to(like.device, like.dtype)
    return [f"{float(model(inputs).double().sum()):.9f} {int(model.training)}" for _ in prompts]


# ------------------------------------------------------------------ what the engine does with them


def counts() -> dict[str, int]:
    """Return the numbers of forward passes of `counted` with gradients and of graphs of torch.compile so far."""
    from torch._dynamo.utils import counters

    return {"forwards": _Counted.forwards, "graphs": int(counters["stats"]["unique_graphs"])}


def is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make torch.compile trace its graphs without compiling them."""
    original = torch.compile
    torch.compile = functools.partial(original, backend="eager")
    try:
        yield
    finally:
        torch.compile = original


# ------------------------------------------------------------------ losses


def pair_loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss and a weight that differs from slice to slice."""
    weights = 1.0 + (targets % 3).to(outputs.dtype)
    losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (losses * weights).sum(), weights.sum()


def unreduced(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


class _Poisoned:
    """Loss that is NaN in the third training forward of the last rank, where its gradient is zero."""

    def __init__(self) -> None:
        self.calls = 0
        self.is_last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(outputs, targets)
        self.calls += torch.is_grad_enabled() and outputs.requires_grad
        is_bad = self.calls == 3 and self.is_last
        return torch.where(torch.tensor(True), float("nan"), loss) if is_bad else loss


def ignoring() -> dict[str, Any]:
    """Return settings of a case whose loss ignores the targets that `samples` marks."""
    return {"data": "ignored"}


def weighing() -> dict[str, Any]:
    """Return settings of a case whose loss weighs the classes."""
    return {"loss_fn": torch.nn.CrossEntropyLoss(weight=torch.tensor(_WEIGHTS), label_smoothing=0.1)}


def poisoned() -> dict[str, Any]:
    """Return settings of a case whose third update is NaN on the last rank."""
    return {"loss_fn": _Poisoned()}


# ------------------------------------------------------------------ metrics


def root_mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a metric that is not a mean over samples, but is not declared with `over_all`."""
    return (outputs.double() ** 2).mean().sqrt()


def metrics() -> dict[str, Any]:
    """Return metrics over all samples of each form, with an object of torchmetrics if that is installed."""
    found = {**overall.declared(), overall.FOUND_OUT: root_mean}
    if importlib.util.find_spec("torchmetrics") is not None:
        from torchmetrics.classification import MulticlassF1Score

        found["object"] = MulticlassF1Score(CLASSES, average="macro")
    return found


# ------------------------------------------------------------------ optimizers and schedules


def sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)


def plain_sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def adamw(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    """Return a schedule for `scheduler_interval="epoch"`."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


# ------------------------------------------------------------------ a short job


def short() -> tuple[Any, Any]:
    """Return a factory of a small model, and 32 samples for it."""
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    return lambda: torch.nn.Linear(6, 3), TensorDataset(inputs, inputs.argmax(1) % 3)
