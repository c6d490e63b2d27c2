"""Load a program of torch.export that MLflow has registered, without running a pickle. MLflow imports this module by its name."""

from __future__ import annotations

import functools
import io
import itertools
import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch._prims  # registers torch.ops.prims
from torch.utils import _pytree as pytree

from distributed.backends._torch.nested import children
from distributed.errors import CheckpointError

# Files that `programs.write` writes for a model of ordinary tensors and operators.
# Workaround (torch 2.13, pytorch/pytorch#186073; the checks may go when torch.export.load runs no code from a file): it reads more
# files, unpickles some entries, evaluates expressions, calls any function of torch that a graph names, and loads shared libraries.
_FILES = re.compile(
    r"(data/(weights|constants)/\w+(\.json)?|models/model\.json|data/sample_inputs/model\.pt|archive_format|archive_version"
    r"|byteorder|\.data/(version|serialization_id)|\.format_version|\.storage_alignment)"
)
_OPERATOR = re.compile(r"torch\.ops\.(aten|prims)\.(\w+)\.(\w+)")
_FUNCTIONS = re.compile(
    r"_operator\.(add|sub|mul|floordiv|truediv|mod|neg|pow|eq|ne|lt|le|gt|ge|getitem)"
    r"|torch\.sym_\w+"
)
_EXPRESSION = re.compile(  # as sympy.srepr writes it, such as Mul(Integer(2), Symbol('s77', integer=True))
    r"([A-Z]\w*\(|'[a-z]\d+'|[a-z]\d+\b|[a-z]+=(True|False)|[\d\s+\-*/%,()<>]|\b(?:True|False|true|false|oo|int_oo)\b)*"
)
# Arguments of operators that take a word of a fixed list, an equation, or the text of an error. Other text may be the path of a file.
_WORDS = frozenset(
    {
        "activation", "algorithm", "approximate", "assert_msg", "device_type", "driver", "equation", "indexing",
        "interpolation", "mode", "norm", "ord", "p", "pad_mode", "padding", "padding_mode", "padding_side", "reduce",
        "rounding_mode", "side", "UPLO",
    }
)  # fmt: skip
_FILE_WORDS = ("file",)  # not "path", because einsum has an argument `path` of numbers
_CONTAINERS = frozenset({"builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"})


class TorchProgram:
    """A program of torch.export as a model of MLflow."""

    def __init__(self, path: Path) -> None:
        program = torch.export.load(checked(path))
        self._call = program.module()
        self._dtypes, self._named_dtypes = _dtypes(program)

    def predict(self, model_input: Any, params: Any = None) -> Any:
        """Return the outputs for one batch as numpy arrays.

        Args:
            model_input: inputs in the form in which the model was trained: an array or a DataFrame, a list of arrays for several
                inputs, or a dict of arrays if the batches were dicts.
            params: not used.
        """
        with torch.no_grad():
            if isinstance(model_input, Mapping):
                named = {name: _tensor(value, self._named_dtypes.get(name)) for name, value in model_input.items()}
                return _arrays(self._call(**named))
            several = isinstance(model_input, (list, tuple)) and all(hasattr(each, "shape") for each in model_input)
            given = model_input if several else [model_input]
            dtypes = itertools.chain(self._dtypes, itertools.repeat(None))
            return _arrays(self._call(*map(_tensor, given, dtypes)))


def _load_pyfunc(path: str) -> TorchProgram:
    """Return the model at `path`. MLflow calls this function by its name."""
    return TorchProgram(Path(path))


def check_program(path: Path) -> None:
    """Raise CheckpointError if the `.pt2` file holds more than tensors and operators of torch, so that loading it could run code."""
    checked(path)


def checked(path: Path) -> io.BytesIO:
    """Return a new archive of the checked files of the `.pt2` file. Raise CheckpointError as `check_program` does.

    Torch must load this archive and not the file: the readers of zip files in Python and in torch can find different content in one
    forged file.
    """
    clean = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(clean, "w", zipfile.ZIP_STORED) as out:
            for name, entry in _entries(archive, path).items():
                content = archive.read(entry)
                _check(name, content, path)
                out.writestr(f"program/{name}", content)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a program of torch.export: {error}") from None
    clean.seek(0)
    return clean


def _entries(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """Return the files of the archive by their names without the first directory."""
    found = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    if len({name.lower() for name in found}) < len(archive.infolist()):  # torch ignores the case of names
        raise _refused(path, "two files of the same name")
    return found


def _check(name: str, content: bytes, path: Path) -> None:
    if not _FILES.fullmatch(name) or (name.endswith(".pt") and content):
        raise _refused(path, f"the file {name}")
    if not name.endswith(".json"):
        return
    for key, value in _pairs(json.loads(content)):
        if key == "use_pickle" and value is not False:
            raise _refused(path, f"a pickle in {name}")
        if key == "path_name" and not str(value).startswith(("weight_", "tensor_")):
            raise _refused(path, f"the object {value}")
        if key in ("target", "as_operator") and isinstance(value, str) and not _is_safe_function(value):
            raise _refused(path, f"the function {value}")
        if key == "inputs" and (text := _unsafe_text(value)):
            raise _refused(path, f"text for the argument {text}")
        if key == "expr_str" and not _EXPRESSION.fullmatch(str(value)):
            raise _refused(path, f"the expression {str(value)[:80]!r}")
        if key.endswith("_spec") and isinstance(value, str) and not _is_plain_spec(json.loads(value)):
            raise _refused(path, f"containers in {key} other than tuples, lists and dicts of torch's own")


def _is_safe_function(target: str) -> bool:
    if found := _OPERATOR.fullmatch(target):
        return _is_safe_operator(*found.groups())
    return bool(_FUNCTIONS.fullmatch(target))


@functools.cache
def _is_safe_operator(namespace: str, name: str, overload: str) -> bool:
    """Return whether torch has the operator, and all text that it takes is harmless. `aten::from_file` can write a file."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or overload not in packet.overloads():  # type: ignore[no-untyped-call]
        return False
    arguments = getattr(packet, overload)._schema.arguments
    return all(
        argument.name in _WORDS
        if re.search(r"\bstr\b", str(argument.type))
        else not any(word in argument.name.lower() for word in _FILE_WORDS)
        for argument in arguments
    )


def _unsafe_text(inputs: Any) -> str | None:
    """Return the name of an argument that is given text and is not known to be harmless."""
    for given in inputs if isinstance(inputs, list) else ():
        if not isinstance(given, dict) or given.get("name") in _WORDS:
            continue
        if any(key in ("as_string", "as_strings") for key, _ in _pairs(given.get("arg"))):
            return str(given.get("name"))
    return None


def _is_plain_spec(content: Any) -> bool:
    """Return whether the tree of containers, as `torch.utils._pytree.treespec_dumps` writes it, needs no import to load.

    The keys of a dict are JSON in a string. torch imports the modules of enums that this JSON names.
    """
    version, tree = content
    return version == 1 and _is_plain_tree(tree)


def _is_plain_tree(tree: Any) -> bool:
    if tree["type"] is None:
        return tree["context"] is None and not tree["children_spec"]
    keys = json.loads(tree["context"])
    is_plain = keys is None or (isinstance(keys, list) and not any(isinstance(key, (dict, list)) for key in keys))
    return tree["type"] in _CONTAINERS and is_plain and all(map(_is_plain_tree, tree["children_spec"]))


def _refused(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is not loaded: it holds {what}, which could run code")


def _pairs(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield each (key, value) of nested JSON."""
    for key, value in content.items() if isinstance(content, dict) else ():
        yield key, value
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from _pairs(value)


def _dtypes(program: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the element types of the program's positional and named inputs. The type is None for an input that is not a tensor."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    flat = [getattr(values.get(str(name)), "dtype", None) for name in program.graph_signature.user_inputs]
    args, kwargs = pytree.tree_unflatten(flat, program.call_spec.in_spec)
    return args, kwargs


def _tensor(value: Any, dtype: Any) -> torch.Tensor:
    """Return a tensor of `value`. Floating-point numbers get the element type `dtype` of the program's input."""
    array = numpy.asarray(value)
    tensor = torch.as_tensor(array)
    if not tensor.is_floating_point():
        return tensor
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return tensor.to(dtype)
    return tensor.float() if tensor.dtype == torch.float64 else tensor  # lists and DataFrames have no float32


def _arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # numpy has no bfloat16
    held = children(value)
    if held is None:
        return value
    return (
        [_arrays(each) for each in held.values()]
        if isinstance(value, (tuple, list))
        else {k: _arrays(v) for k, v in held.items()}
    )
