"""Compute a module's graph and the values of its weights and gradients for TensorBoard. Training is not affected."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from distributed.backends._torch.nested import children, rebuilt

ComputeLoss = Callable[[Callable[..., Any], Any], Any]


class _Traced(torch.nn.Module):
    """Compute the loss as a function of tensors only, as the tracer requires."""

    def __init__(self, model: torch.nn.Module, objective: ComputeLoss, batch: Any) -> None:
        super().__init__()
        self.model = model
        self._objective, self._batch = objective, batch

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._objective(self.model, _filled(self._batch, iter(tensors))).value
        return loss


def graph_of(model: torch.nn.Module, objective: ComputeLoss, batch: Any, num_samples: int) -> bytes:
    """Return a GraphDef of the model and its loss in eval mode, traced on one sample of the batch.

    Raises whatever the model raises under torch's tracer. The caller saves and restores the generators.
    """
    sample = _first_sample(batch, num_samples)
    traced = type(type(model).__name__, (_Traced,), {})(model, objective, sample)
    with _as_it_was(model), torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the tracer warns about values that it treats as constants
        made, _ = _converter().graph(traced, tuple(_tensors(sample)), use_strict_trace=False)
    content: bytes = made.SerializeToString()
    return content


def _converter() -> Any:
    """Return the module that `SummaryWriter.add_graph` calls, without its package.

    Workaround (torch 2.13, no upstream issue known; may go when the package does not import TensorFlow): it imports
    TensorFlow if that is installed (`_embedding.py`), which takes seconds and hundreds of megabytes.
    """
    name = "distributed_torch_tensorboard"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(torch.__file__).parent / "utils" / "tensorboard")]
        sys.modules[name] = package
    return importlib.import_module(f"{name}._pytorch_graph")


@contextlib.contextmanager
def _as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Restore the modes and buffers of the model at the end of this block."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def values_of(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (`weights/NAME` or `gradients/NAME`, flat array) for this rank's part of each parameter."""
    for name, parameter in model.named_parameters():
        yield f"weights/{name}", _flat(parameter)
        if parameter.grad is not None:
            yield f"gradients/{name}", _flat(parameter.grad)


def _flat(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):  # a DTensor
        tensor = tensor.to_local()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    wide = tensor.cpu() if tensor.dtype == torch.float64 else tensor.cpu().float()
    return wide.reshape(-1).numpy()


def _first_sample(value: Any, num_samples: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[:1] if value.dim() and len(value) == num_samples else value
    held = children(value)
    return value if held is None else rebuilt(value, {k: _first_sample(v, num_samples) for k, v in held.items()})


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for child in (children(value) or {}).values() for tensor in _tensors(child)]


def _filled(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return `value` with its tensors replaced in order."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    held = children(value)
    return value if held is None else rebuilt(value, {key: _filled(child, tensors) for key, child in held.items()})
