"""Build the optimizer and the schedule that settings name for torch models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from distributed.config.optimization import NamedOptimizer, RateCurve
from distributed.errors import ConfigError

Notice = Callable[[str], None]
_NAMED = "named_by_settings"  # attribute of an optimizer that settings name
_OPTIONS = ("weight_decay", "betas", "momentum")  # of a parameter group, as far as its optimizer has them


def build(wanted: NamedOptimizer, model: torch.nn.Module, notice: Notice) -> torch.optim.Optimizer:
    """Return the optimizer for the trainable parameters of `model`.

    Parameters with the same rate and decay are in one parameter group. Raises ConfigError if an entry of `layer_rates` applies
    to no parameter.
    """
    optimizer = _built(wanted, model, notice)
    vars(optimizer)[_NAMED] = True
    return optimizer


def _built(wanted: NamedOptimizer, model: torch.nn.Module, notice: Notice) -> torch.optim.Optimizer:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    wanted.check_starts([name for name, _ in named])
    if wanted.name == "muon":
        return _muon(wanted, model, named, notice)
    arguments: dict[str, Any] = {"lr": wanted.learning_rate}
    if wanted.name in ("adamw", "adam") and wanted.betas is not None:
        arguments["betas"] = wanted.betas
    if wanted.name == "sgd" and wanted.momentum is not None:
        arguments["momentum"] = wanted.momentum
    kinds: Mapping[str, Any] = {
        "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adafactor": torch.optim.Adafactor,
    }  # fmt: skip
    _show_decay(wanted, named, notice)
    optimizer: torch.optim.Optimizer = kinds[wanted.name](_groups(wanted, named), **arguments)
    return optimizer


def is_named(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether settings name the optimizer, so that they decide its options after a resume too."""
    return _NAMED in vars(optimizer)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group that settings decide, except for the rates."""
    return [{name: group[name] for name in _OPTIONS if name in group} for group in optimizer.param_groups]


def set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]], notice: Notice) -> None:
    """Set the `options` that settings decide, after a checkpoint was loaded. Show a notice for each one that differs in it."""
    notices: dict[str, str] = {}
    for group, own in zip(optimizer.param_groups, options, strict=True):
        for name, value in own.items():
            stored = group[name]
            if (tuple(stored) if isinstance(stored, (list, tuple)) else stored) != value:
                notices.setdefault(name, f"{name}={value} replaces the checkpoint's {stored}")
            group[name] = value
    for text in notices.values():
        notice(text)


def _groups(wanted: NamedOptimizer, named: list[tuple[str, torch.nn.Parameter]]) -> list[dict[str, Any]]:
    """Return one parameter group for each pair of rate and decay, those with the full rate first."""
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in named:
        groups.setdefault((wanted.factor(name), wanted.decay_of(parameter.dim())), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda item: item[0][0] != 1.0)  # the first group's rate is logged
    return [
        {"params": parameters, "lr": wanted.learning_rate * factor, "weight_decay": decay}
        for (factor, decay), parameters in ordered
    ]


def _show_decay(wanted: NamedOptimizer, named: list[tuple[str, torch.nn.Parameter]], notice: Notice) -> None:
    if text := wanted.decay_notice([parameter.dim() for _, parameter in named]):
        notice(text)


class MuonWithAdamW(torch.optim.Optimizer):
    """Update the weights of linear layers with Muon and all other parameters with AdamW.

    Muon takes matrices only. Its updates are scaled to the size of those of AdamW (Liu et al., arXiv 2502.16982), so that both
    take the same learning rate and weight decay.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        groups = [group for part in (muon, adamw) for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {"lr": groups[0]["lr"]})
        self.param_groups = groups
        self._muon, self._adamw, self._num_of_muon = muon, adamw, len(muon.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one update."""
        number = self._num_of_muon
        # Both parts use the groups and the state of this object, because an engine may have replaced them.
        for part, groups in ((self._muon, self.param_groups[:number]), (self._adamw, self.param_groups[number:])):
            part.param_groups, part.state = groups, self.state
            part.step()


def _muon(
    wanted: NamedOptimizer, model: torch.nn.Module, named: list[tuple[str, torch.nn.Parameter]], notice: Notice
) -> torch.optim.Optimizer:
    linear = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}  # tied to the last layer
    matrices = [(name, p) for name, p in named if id(p) in linear - embedded]
    others = [(name, p) for name, p in named if id(p) not in linear - embedded]
    if not matrices:
        raise ConfigError("optimizer='muon' updates the weights of linear layers, and the model has none: choose adamw")
    notice(f"muon updates {len(matrices)} weights of linear layers, and adamw the other {len(others)} parameters")
    _show_decay(wanted, named, notice)
    momentum: dict[str, Any] = {} if wanted.momentum is None else {"momentum": wanted.momentum}
    muon = torch.optim.Muon(
        _groups(wanted, matrices), lr=wanted.learning_rate, adjust_lr_fn="match_rms_adamw", **momentum
    )
    if not others:
        return muon
    betas: dict[str, Any] = {} if wanted.betas is None else {"betas": wanted.betas}
    return MuonWithAdamW(muon, torch.optim.AdamW(_groups(wanted, others), lr=wanted.learning_rate, **betas))


class CurveSchedule(LRScheduler):
    """Set the rates by a `RateCurve`. Its state in a checkpoint is the length of the curve and the number of updates."""

    def __init__(self, optimizer: torch.optim.Optimizer, curve: RateCurve) -> None:
        self.curve = curve
        super().__init__(optimizer)

    @property
    def kind(self) -> str:
        """The name of the schedule."""
        return self.curve.kind

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rate of each parameter group for the next update."""
        factor = self.curve.factor(self.last_epoch, max(map(float, self.base_lrs)))
        return [rate * factor for rate in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `load_state_dict` takes."""
        return {"length": self.curve.length, "last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after `last_epoch` updates of a curve of the stored length. Restore the optimizer first."""
        self.curve = self.curve.of_length(int(state["length"]))
        self.last_epoch = int(state["last_epoch"])
        self._step_count = self.last_epoch + 1
        self.base_lrs = [group.setdefault("initial_lr", group["lr"]) for group in self.optimizer.param_groups]
        self.set_rates()

    def set_rates(self) -> None:
        """Set the rate of each parameter group for the next update."""
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
