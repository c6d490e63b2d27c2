"""Recompute activations of a model's repeated blocks in the backward pass, permanently or within a scope."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

from distributed.backends._torch.modules import repeated_blocks
from distributed.errors import ConfigError


def checkpoint_activations(model: torch.nn.Module) -> int:
    """Recompute the activations of the model's repeated blocks in the backward pass. Return the number of blocks.

    A Hugging Face model does so by its own method and counts as one block. Names in `state_dict` do not change.
    """
    if _switch_on(model):
        return 1
    blocks = repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            "activation_checkpointing=True found no repeated block (a ModuleList or Sequential of modules with sub-modules):"
            " use torch.utils.checkpoint in the model's forward, or drop it"
        )
    for block in blocks:
        _recompute(block)
    return len(blocks)


class Recomputing:
    """Recompute the activations of `modules` while the context is entered.

    Without `modules`, the repeated blocks of every model that is called are recomputed.
    """

    def __init__(self, modules: tuple[Any, ...]) -> None:
        for module in modules:
            if not isinstance(module, torch.nn.Module):
                raise ConfigError(
                    f"checkpoint_scope() got a {type(module).__name__}: pass modules of the model, or nothing"
                )
        self._modules = modules

    def __enter__(self) -> None:
        self._known: set[torch.nn.Module] = set()
        self._changed: list[torch.nn.Module] = []
        self._switched: list[Callable[[], None]] = []
        self._hook = None if self._modules else register_module_forward_pre_hook(self._called)
        self._change(list(self._modules))

    def __exit__(self, *failure: object) -> None:
        if self._hook is not None:
            self._hook.remove()
        for block in self._changed:
            del block.forward  # restore the method of the class
        for switch_off in self._switched:
            switch_off()

    def _called(self, model: torch.nn.Module, args: Any) -> None:
        """Change a model before its first forward in the scope. The outermost module is called first."""
        if model in self._known or not torch.is_grad_enabled():
            return
        self._known.update(model.modules())
        inner = next((m for m in model.modules() if _switch(m, "enable")), None)
        if inner is not None:
            is_on = any(getattr(m, "gradient_checkpointing", False) for m in inner.modules())
            if not is_on and _switch_on(inner):
                self._switched.append(_switch(inner, "disable"))
        elif any(p.requires_grad for p in model.parameters()):
            blocks = repeated_blocks(model)
            # After a model that was changed, a module without blocks may follow, such as a loss with parameters.
            if not blocks and not self._changed and not self._switched:
                raise ConfigError(
                    f"checkpoint_scope() found no repeated block in {type(model).__name__} (a ModuleList or Sequential of"
                    " modules with sub-modules): name what to recompute, as in checkpoint_scope(model.encoder)"
                )
            self._change(blocks)

    def _change(self, blocks: list[torch.nn.Module]) -> None:
        for block in blocks:
            if "forward" not in vars(block):  # otherwise the block already recomputes
                _recompute(block)
                self._changed.append(block)


def is_recomputing() -> bool:
    """Return whether this thread runs a forward pass a second time, within a backward pass.

    Hooks of gradients also run within a backward pass, but without gradients of their own.
    """
    return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()


def _switch_on(model: torch.nn.Module) -> bool:
    own = _switch(model, "enable")
    if own is not None:
        own({"use_reentrant": False})
    return own is not None


def _switch(model: torch.nn.Module, verb: str) -> Any:
    """Return a Hugging Face model's own method for recomputing, or None. The method was renamed in transformers 5."""
    own = getattr(model, f"activation_checkpointing_{verb}", None)
    return own or getattr(model, f"gradient_checkpointing_{verb}", None)


def _recompute(block: torch.nn.Module) -> None:
    block.forward = functools.partial(_checkpointed, block.forward)


def _checkpointed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
