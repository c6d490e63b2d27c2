"""Turn a sharded model into the ordinary module that the user gave.

The ordinary module has whole parameters and none of fully_shard's additions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import FSDPModule

from distributed.backends._torch.sharding import is_sharded, take_part, whole
from distributed.config.memory import available_bytes
from distributed.errors import ConfigError

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"
_HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)  # fmt: skip


class WholeForm:
    """Exchange the sharded parameters of a model for whole ones and back, in the same module objects.

    Only `gather` is a collective. Workaround (torch 2.13, no upstream issue known; may go when torch can undo
    fully_shard): the classes, hooks and records that fully_shard adds are set aside and put back here.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Prepare `model`, which fully_shard has sharded."""
        self._model = model
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._classes = [type(unit) for unit in self._units]
        # fully_shard's hooks, which are removed while the model is whole
        self._hooks: list[tuple[dict[int, Any], dict[int, Any], list[int]]] = []
        # fully_shard's records in the units, which hold process groups
        self._records: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._owners: list[tuple[dict[str, Any], str, torch.nn.Parameter]] = []
        self._buffers: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._whole: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # sharded parameter -> whole parameter
        self.is_shown = False  # whether the model now has the whole parameters
        self.is_current = False  # whether the whole parameters have the values of the sharded ones

    @property
    def num_bytes(self) -> int:
        """The size of the whole parameters in bytes."""
        return sum(p.numel() * p.element_size() for p in self._model.parameters() if is_sharded(p))

    def gather(self, home: torch.device, *, keep: bool = True) -> None:
        """Assemble every parameter on `home`, one after the other. All ranks must call it.

        With `keep=False` this rank only takes part in the collectives.
        """
        self.reshard()
        self._owners = [
            (module._parameters, name, parameter)  # type: ignore[misc]
            for module in self._model.modules()
            for name, parameter in module._parameters.items()
            if is_sharded(parameter)
        ]
        for parameter in dict.fromkeys(parameter for _, _, parameter in self._owners):
            full = whole(parameter.detach())
            if keep:
                self._fill(parameter, full.to(home))
        self.is_current = keep

    def _fill(self, pieces: torch.nn.Parameter, full: torch.Tensor) -> None:
        """Fill the whole parameter.

        The Parameter objects stay the same, so that any reference to one shows the weights after each fit.
        """
        if pieces in self._whole:
            self._whole[pieces].data = full
        else:
            self._whole[pieces] = torch.nn.Parameter(full, requires_grad=pieces.requires_grad)

    def show(self, home: torch.device) -> None:
        """Put the whole parameters into the model, move its buffers to `home` and set aside what fully_shard added."""
        if self.is_shown:
            return
        self.reshard()
        for unit, cls in zip(self._units, self._classes, strict=True):
            unit.__class__ = cls.__bases__[1]  # the second base of FSDPLinear, which is (FSDPModule, Linear)
            own = vars(unit)
            self._records.append((own, {key: own.pop(key) for key in (STATE_KEY, REGISTRY_KEY) if key in own}))
        for module in self._model.modules():
            for kind in _HOOKS:
                self._set_aside_hooks(vars(module)[kind])
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != home:
                    self._buffers.append((module._buffers, name, buffer))
                    module._buffers[name] = buffer.to(home)
        for owner, name, pieces in self._owners:
            owner[name] = self._whole[pieces]
        self.is_shown = True

    def hide(self, *, take_values: bool = True) -> None:
        """Put the sharded parameters back, with the current values of the whole ones.

        Raises ConfigError if a parameter is missing.
        """
        if not self.is_shown:
            return
        for owner, name, pieces in self._owners:
            if take_values:
                self._take(owner.get(name), name, pieces)
            owner[name] = pieces
        for buffers, name, buffer in self._buffers:
            buffers[name] = buffer
        for hooks, taken, order in self._hooks:
            both = {**taken, **hooks}
            hooks.clear()
            hooks.update({key: both[key] for key in [*order, *both] if key in both})
        for unit, cls in zip(self._units, self._classes, strict=True):
            unit.__class__ = cls
        for own, records in self._records:
            own.update(records)
        self._hooks, self._records, self._buffers, self.is_shown = [], [], [], False

    def release(self) -> None:
        """Free the whole parameters. The next `gather` fills them again."""
        for parameter in self._whole.values():
            parameter.data = parameter.data.new_empty(0)
        self.is_current = False

    def reshard(self) -> None:
        """Free parameters that a forward pass left gathered. Not a collective."""
        for unit in self._units:
            unit.reshard()

    def _set_aside_hooks(self, hooks: dict[int, Any]) -> None:
        taken = {key: hook for key, hook in hooks.items() if _is_of_fully_shard(hook)}
        if taken:
            self._hooks.append((hooks, taken, list(hooks)))
            for key in taken:
                del hooks[key]

    @staticmethod
    def _take(parameter: torch.nn.Parameter | None, name: str, pieces: torch.nn.Parameter) -> None:
        if parameter is None or parameter.shape != pieces.shape:
            raise ConfigError(
                f"the parameter {name} of the model was removed or changed its shape after the fit: make a new Trainer with the"
                " changed model"
            )
        take_part(pieces, parameter.detach())


def _is_of_fully_shard(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)  # torch wraps hooks of load_state_dict in an object
    return str(getattr(function, "__module__", "")).startswith(_FULLY_SHARD)


def free_bytes(device: torch.device, num_sharing: int) -> int:
    """Return the memory in bytes that one of `num_sharing` processes can still allocate on `device`.

    The memory of the host is divided by `num_sharing`, that of a GPU is not.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    return (available_bytes() or 0) // num_sharing


@contextlib.contextmanager
def whole_for_a_while(model: torch.nn.Module, *, is_main: bool) -> Iterator[torch.nn.Module | None]:
    """Yield `model`, whole and on the CPU, on the main process, and None on all other ranks. All ranks must call it.

    Changes made to the model in this block are lost.
    """
    form, cpu = WholeForm(model), torch.device("cpu")
    form.gather(cpu, keep=is_main)
    if not is_main:
        yield None
        return
    form.show(cpu)
    try:
        yield model
    finally:
        form.hide(take_values=False)
