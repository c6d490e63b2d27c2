"""Write a torch module as a program that runs without its class: for ONNX, torch.export and transformers. Check the program."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from distributed.backends._torch.nested import children, move, rebuilt
from distributed.backends._torch.tensors import unwrap
from distributed.backends.same_outputs import Output, largest_difference
from distributed.errors import ConfigError

# Errors that exporters raise for a model that they cannot export.
REFUSALS: tuple[type[Exception], ...] = (
    RuntimeError,
    TypeError,
    ValueError,
    NotImplementedError,
    AttributeError,
    AssertionError,
    KeyError,
    IndexError,
)
# Size above which torch.onnx writes the weights to a second file (_LARGE_MODEL_THRESHOLD in
# torch/onnx/_internal/exporter/_onnx_program.py).
_ONNX_BYTES = 1536 * 1024**2
_OPERATOR = re.compile(r"op='([\w.]+)'|operator[ :`']+((?:aten|prims|torchvision|\w+)(?:::|\.)\w+)")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Call = Callable[..., Any]


def write(model: torch.nn.Module, path: Path, form: str, example: Any) -> tuple[float, bool]:
    """Write the plain module of `model` to `path`, and check it on the example.

    Returns the largest absolute difference of an output, and whether the size of a batch is free. Raises ConfigError if the format
    cannot hold the model, or if the outputs differ by more than rounding.
    """
    plain = unwrap(model)
    if form == "onnx":
        _check_size(plain)
    if any(tensor.device.type != "cpu" for tensor in (*plain.parameters(), *plain.buffers())):
        plain = copy.deepcopy(plain).cpu()  # a program runs on the device on which it was traced
    arguments = arguments_of(plain, example)
    with evaluating(plain), torch.no_grad():
        try:
            wanted = plain(*arguments[0], **arguments[1])
        except TypeError as error:
            raise ConfigError(f"the model does not take the example: {error}: pass the inputs of one batch") from error
        if form == "huggingface":
            return _compared(form, wanted, _hugging_face(plain, path)(*arguments[0], **arguments[1])), True
        program, is_free = traced(plain, arguments, form)
        if form == "onnx":
            run = _onnx(program, path)
        else:
            _save_program(program, path)
            run = _loaded(path)
        difference = _compared(form, wanted, run(*arguments[0], **arguments[1]))
        fewer = _first_samples(arguments, _batch_size(arguments) - 1)
        if not is_free or (wanted := _if_possible(plain, fewer)) is None or (found := _if_possible(run, fewer)) is None:
            return difference, False
        return max(difference, _compared(form, wanted, found)), True


def _check_size(model: torch.nn.Module) -> None:
    """Raise ConfigError if the weights do not fit into the one file of ONNX."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    if size > _ONNX_BYTES:
        raise ConfigError(
            f"the weights are {size:,} bytes, and the format 'onnx' holds at most {_ONNX_BYTES:,} in one file: choose another format,"
            " such as torch-export"
        )


def _if_possible(call: Call, arguments: Arguments) -> Any:
    """Return the outputs for a batch of another size, or None if the model or the program does not take it."""
    try:
        return call(*arguments[0], **arguments[1])
    except REFUSALS:
        return None


def arguments_of(model: torch.nn.Module, example: Any) -> Arguments:
    """Return the positional and named arguments of a call, on the device of the model."""
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in model.parameters()) else None
    moved = move(example, device, dtype)
    if isinstance(moved, Mapping):
        return (), dict(moved)
    return (tuple(moved) if isinstance(moved, (tuple, list)) else (moved,)), {}


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode within the block, and restore the mode of each module after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def traced(model: torch.nn.Module, arguments: Arguments, form: str) -> tuple[Any, bool]:
    """Return the program of the model as torch.export holds it, and whether the size of a batch is free.

    Raises ConfigError, for the format `form`, with the operator or the line of the model that torch.export cannot hold.
    """
    size = _batch_size(arguments)
    free: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    named = [tensor for tensor in _tensors(arguments) if size > 1 and tensor.dim() and len(tensor) == size]
    for tensor in named:
        free[tensor] = {0: torch.export.Dim.AUTO}
    with _refused_as(form):
        program = torch.export.export(model, *arguments, dynamic_shapes=free)
    program.example_inputs = None  # else the file has the samples of the batch
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    return program, any(_is_free(value) for value in inputs)


def _is_free(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and isinstance(value.shape[0], torch.SymInt)


def _batch_size(arguments: Arguments) -> int:
    return next((len(tensor) for tensor in _tensors(arguments) if tensor.dim()), 0)


def _first_samples(arguments: Arguments, count: int) -> Arguments:
    size = _batch_size(arguments)

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[:count] if value.dim() and len(value) == size else value
        held = children(value)
        return value if held is None else rebuilt(value, {key: cut(child) for key, child in held.items()})

    return tuple(map(cut, arguments[0])), {name: cut(value) for name, value in arguments[1].items()}


def _save_program(program: Any, path: Path) -> None:
    with path.open("wb") as file, _quiet():
        torch.export.save(program, file)


def _loaded(path: Path) -> Call:
    with path.open("rb") as file, _quiet():
        call: Call = torch.export.load(file).module()
    return call


def _onnx(program: Any, path: Path) -> Call:
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as errors

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    with _refused_as("onnx", errors.Fail, errors.InvalidGraph, errors.NotImplemented, errors.InvalidArgument):
        made = torch.onnx.export(program, (), dynamo=True, verbose=False)
        assert made is not None
        made.save(path)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        values = [tensor.detach().cpu().numpy() for tensor in _tensors((args, kwargs))]
        return [torch.as_tensor(value) for value in session.run(None, dict(zip(names, values, strict=True)))]

    return run


def _hugging_face(model: Any, path: Path) -> Call:
    with _refused_as("huggingface"):
        model.save_pretrained(path)
        made = type(model).from_pretrained(path)
    device = next(model.parameters()).device
    call: Call = made.to(device).eval()
    return call


def _compared(form: str, wanted: Any, found: Any) -> float:
    """Return the largest absolute difference between two outputs. Raises ConfigError if it is more than rounding."""
    return largest_difference(f"the {form} file", *(list(map(_output, _tensors(each))) for each in (wanted, found)))


def _output(tensor: torch.Tensor) -> Output:
    return str(tensor.dtype).removeprefix("torch."), tensor.detach().cpu().to(torch.float64).numpy()


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside `value`, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for child in (children(value) or {}).values() for tensor in _tensors(child)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the output, the logs and the warnings of torch in this block."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    hidden = io.StringIO()
    try:
        with contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _refused_as(form: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn `REFUSALS` and `errors` into a ConfigError of one line that names the operator or the line of the model."""
    try:
        with _quiet():
            yield
    except (*REFUSALS, *errors) as error:
        raise ConfigError(_refusal(form, error)) from None


def _refusal(form: str, error: BaseException) -> str:
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    line = next((part.strip() for part in str(root).splitlines() if part.strip()), type(root).__name__)
    found = _OPERATOR.search(str(root))
    what = f"the operator {found[1] or found[2]}" if found else "this model"
    if "data-dependent" in str(root):
        what, line = "a decision on the value of a tensor (aten.item)", "torch.where() decides without it"
    line = line.partition(". ")[0]
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_of_library(frame.filename)]
    where = f" at {Path(own[-1].filename).name}:{own[-1].lineno} ({own[-1].line})" if own else ""
    return (
        f"the format {form!r} cannot hold {what}{where}: {line.rstrip('.')}: change the model, or choose another format"
    )


def _is_of_library(file: str) -> bool:
    return any(part in file for part in ("site-packages", "/distributed/", "<", "lib/python"))
