"""Read weights that other programs have saved. Run as a process of its own: `python -m distributed.backends._torch.foreign`.

Only `backends/converting.py` starts it. Its arguments are the file descriptor for its answer, and the order, in JSON, that
says what to read.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.runs.processes import leave, skip_teardown

if TYPE_CHECKING:
    import torch

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
# Names under which programs store the weights in their checkpoints.
_INSIDE = ("state_dict", "model_state_dict", "model", "module", "weights", "app")
# Parts that wrappers of modules insert into the names of parameters.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_SHOWN = 8  # names that a message lists


class _UntrustedError(Exception):
    """The file needs a class or a function that may run code."""


def leave_network() -> bool:
    """Move this process into an empty network. Return False if the system does not allow it.

    Called before threads are started, because a process with threads cannot get a user namespace.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.unshare(_CLONE_NEWNET) == 0 or libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0)


def read(order: Mapping[str, Any]) -> dict[str, Any]:
    """Write the weights that `order` names to its output file. Return the names that were skipped, or the problem."""
    from distributed.backends._torch.tensor_io import write_file
    from distributed.errors import DistributedError

    try:
        content = _READERS[order["format"]](order)
        named = _without_wrappers(_with_prefix(_weights_in(content, order["key"]), order["prefix"]))
        tensors, skipped = _tensors(named)
        write_file(Path(order["out"]), tensors, {"format": "pt"})
    except _UntrustedError as error:
        return {"skipped": [], "untrusted": str(error)}
    except (DistributedError, OSError, LookupError, ValueError) as error:
        return {"skipped": [], "problem": str(error).strip("'\"")}
    return {"skipped": skipped}


# --------------------------------------------------------------------- formats


def _read_torch(order: Mapping[str, Any]) -> Any:
    found = [_load(Path(file), trust=order["trust"]) for file in order["files"]]
    return found[0] if len(found) == 1 else {name: value for each in found for name, value in each.items()}


def _load(file: Path, *, trust: bool) -> Any:
    import pickle

    import torch

    is_zip = zipfile.is_zipfile(file)  # else it cannot be memory-mapped
    with file.open("rb") as opened:
        if not is_zip and opened.read(1) != pickle.PROTO:
            raise ValueError("it is damaged, or was not written by torch.save")
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        needs = re.search(r"GLOBAL (\S+)", str(error))
        if needs is None:
            raise ValueError("it is damaged, or was not written by torch.save") from None
        if not trust:
            raise _UntrustedError(needs[1]) from None
    except (RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError) as error:
        first = (str(error).splitlines() or ["it ends too early"])[0]
        raise ValueError(f"it is damaged, or was not written by torch.save ({first})") from None
    return torch.load(file, map_location="cpu", weights_only=False, mmap=is_zip)


def _read_safetensors(order: Mapping[str, Any]) -> Any:
    from safetensors.torch import load_file

    content: dict[str, Any] = {}
    for file in order["files"]:
        tensors = load_file(file)
        if again := sorted(content.keys() & tensors.keys()):
            raise ValueError(f"{again[0]} is in several of its files, as of several models: name one of them")
        content |= tensors
    return content


def _read_dcp(order: Mapping[str, Any]) -> Any:
    # Workaround (torch 2.13, pytorch/pytorch#125528; may go when a public function reads a checkpoint into a dict): the public
    # functions either need a model or write a file of torch.save, so this function uses a private planner.
    from torch.distributed.checkpoint import FileSystemReader, default_planner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    content: dict[str, Any] = {}
    planner: Any = default_planner
    reader = FileSystemReader(order["path"])
    _load_state_dict(content, storage_reader=reader, planner=planner._EmptyStateDictLoadPlanner(), no_dist=True)
    return content


def _read_deepspeed(order: Mapping[str, Any]) -> Any:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    path = Path(order["path"])
    if any(path.glob("*_optim_states.pt")):  # ZeRO: the weights in float32 are in the state of the optimizer
        return get_fp32_state_dict_from_zero_checkpoint(str(path.parent), path.name)
    files = sorted(path.glob("*_model_states.pt"))
    if len(files) > 1:
        raise ValueError("its model is divided by tensor parallelism, which is not supported")
    return _load(files[0], trust=True)


_READERS = {"torch": _read_torch, "safetensors": _read_safetensors, "DCP": _read_dcp, "DeepSpeed": _read_deepspeed}

# --------------------------------------------------------------------- names


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _weights_in(content: Any, key: str | None) -> Mapping[str, Any]:
    """Return the state dict in a saved object. Raises ValueError with the names in the object if there is no state dict."""
    import torch

    where = ""
    for part in key.split(".") if key else ():
        if not isinstance(content, Mapping) or part not in content:
            raise ValueError(f"there is no {key}: {where or 'it'} has {_names(content)}")
        content, where = content[part], f"{where}.{part}".lstrip(".")
    while True:
        if isinstance(content, torch.nn.Module):
            content = content.state_dict()
        if not isinstance(content, Mapping):
            raise ValueError(f"{where or 'it'} holds no weights, but a {type(content).__name__}")
        if any(map(_is_tensor, content.values())):
            return content
        inside = next((name for name in _INSIDE if isinstance(content.get(name), Mapping | torch.nn.Module)), None)
        if inside is None:
            raise ValueError(
                f"no weights were found: {where or 'it'} has {_names(content)}; say where they are with --key"
            )
        content, where = content[inside], f"{where}.{inside}".lstrip(".")


def _names(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"no names, because it is a {type(content).__name__}"
    names = [str(name) for name in content]
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _with_prefix(named: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries whose names begin with `prefix`, and remove it from the names. Raises ValueError if there are none."""
    found = {str(name)[len(prefix) :]: value for name, value in named.items() if str(name).startswith(prefix)}
    if not found:
        raise ValueError(f"no name begins with {prefix!r}: it has {_names(named)}")
    return found


def _without_wrappers(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return `named` with the names from before DDP, FSDP, `torch.compile` or activation checkpointing wrapped the module."""
    plain = {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): value for name, value in named.items()
    }
    while all(name.startswith("module.") for name in plain):  # of DDP
        plain = {name.removeprefix("module."): value for name, value in plain.items()}
    return plain


def _tensors(named: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors, and the names of everything else."""
    import torch

    tensors = {name: torch.as_tensor(value).detach() for name, value in named.items() if _is_tensor(value)}
    for name, tensor in tensors.items():
        if tensor.is_sparse or tensor.is_quantized or tensor.device.type != "cpu":
            raise ValueError(
                f"{name} is a tensor of a kind that safetensors cannot hold ({tensor.layout}, {tensor.dtype})"
            )
    return tensors, sorted(name for name in named if name not in tensors)


def main() -> None:
    """Read the checkpoint that the arguments name, and write the answer."""
    answers, order = int(sys.argv[1]), json.loads(sys.argv[2])
    is_isolated = order["format"] == "safetensors" or leave_network()
    answer = read(order)
    os.write(answers, json.dumps({**answer, "is_isolated": is_isolated}).encode())
    skip_teardown()
    leave(0)


if __name__ == "__main__":
    main()
