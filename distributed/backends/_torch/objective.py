"""Compute the loss of a batch for every form of model, batch and loss that `Trainer` accepts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from distributed.backends._torch.counted import ClassLoss, class_loss
from distributed.backends.base import TARGET_NAMES
from distributed.backends.failures import not_a_loss
from distributed.errors import ConfigError, TrainingError
from distributed.metrics.monitor import check_names

_EXAMPLE = (
    "give one, for example Trainer(model, loss_fn=torch.nn.functional.cross_entropy), or a training_step(model, batch)"
)


@dataclasses.dataclass(slots=True)
class Loss:
    """Hold the differentiable loss of one micro-batch.

    If `count` is None, `value` is a mean over the samples of the batch. Otherwise `value` is a sum, to be divided by
    `count`.
    """

    value: torch.Tensor
    count: torch.Tensor | float | None
    outputs: Any = None
    targets: Any = None
    metrics: Mapping[str, Any] | None = None


def as_loss(value: Any, metric: str | None = None) -> Loss:
    """Return the Loss for a value returned by a `loss_fn` or a metric.

    `value` may be a scalar mean, any other tensor (its mean over all elements is taken), or a pair (sum, count). Raises
    ConfigError for anything else; the message names `metric` if it is given.
    """
    if isinstance(value, tuple) and len(value) == 2:
        total, count = value
        return Loss(_tensor(total, metric), count.detach() if isinstance(count, torch.Tensor) else float(count))
    value = _tensor(value, metric)
    if value.dim() == 0:
        return Loss(value, None)
    return Loss(value.sum(), float(value.numel()))


def _tensor(value: Any, metric: str | None) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value), dtype=torch.float64)
    raise not_a_loss(value, metric)


class Objective:
    """Call the model on a batch and compute its loss. The form of the loss is chosen at the first batch and kept."""

    def __init__(
        self,
        loss_fn: Callable[..., Any] | None,
        training_step: Callable[..., Any] | None,
        plain_model: torch.nn.Module,
        notice: Callable[[str], None],
    ) -> None:
        self._loss_fn, self._training_step = loss_fn, training_step
        # Called with a metric that is found at the first batch.
        self.add_metric: Callable[[str, Any], None] = lambda name, metric: None
        self._plain = plain_model
        self._notice = notice
        self._noticed: set[str] = set()
        self._default: Callable[..., torch.Tensor] | None = None
        self._class_loss = None if loss_fn is None else class_loss(loss_fn)
        self.counts: bool = False  # whether training divides a class loss by its count, summed over the ranks
        self.takes_count: bool = False  # whether the model divides by the num_items_in_batch that we pass
        self._shifts = _shifts_by_name(plain_model)  # whether the loss ignores the first label of each row
        self._is_float64 = {p.dtype for p in plain_model.parameters()} == {torch.float64}

    def __call__(self, model: Callable[..., Any], batch: Any, num_items: torch.Tensor | None = None) -> Loss:
        """Return the loss of `batch`.

        `num_items` is the number of labels of the whole update, for models that divide by it.
        """
        if self._training_step is not None:
            return self._from_step(self._step(model, batch), batch)
        if isinstance(batch, Mapping):
            return self._from_mapping(model, batch, num_items)
        if isinstance(batch, (tuple, list)) and len(batch) >= 2:
            outputs = model(*batch[:-1])
            targets = batch[-1]
        elif self._loss_fn is not None or not isinstance(batch, (tuple, list)):
            inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
            outputs, targets = model(inputs), inputs
        else:
            raise ConfigError(
                "a sample has one element, so there are no targets: let the data yield (inputs, targets), pass loss_fn=..., which then"
                " compares the outputs with the inputs, or give a training_step(model, batch)"
            )
        if self._loss_fn is None and (own := self._own_loss(outputs)) is not None:
            return dataclasses.replace(self._weigh(own, batch), outputs=outputs)
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            self._notice_once("the data has no targets: outputs are compared with the inputs")
        return self.compare(outputs, targets)

    def compare(self, outputs: Any, targets: Any) -> Loss:
        """Return the loss of `outputs` against `targets`, computed by the user's loss or the default one."""
        loss_fn = self._loss_fn or self._default
        if loss_fn is None:
            loss_fn = self._default = self._choose_default(outputs, targets)
            self._class_loss = class_loss(loss_fn)
        if self._class_loss is not None and _are_classes(targets):
            targets = targets.long()  # torch takes no other class indices, except for uint8
        if self._class_loss is not None and (self.counts or not torch.is_grad_enabled()) and _are_classes(targets):
            value: Any = self._class_loss(outputs, targets)
        else:
            value = loss_fn(outputs, targets)
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return Loss(value, None, outputs, targets)
        return dataclasses.replace(as_loss(value), outputs=outputs, targets=targets)

    def target_name(self, batch: Mapping[str, Any]) -> str | None:
        """Return the key of the targets in a named batch, which the model does not receive.

        Return None without a `loss_fn`.
        """
        return next((name for name in TARGET_NAMES if name in batch), None) if self._loss_fn is not None else None

    def predict(self, model: Callable[..., Any], batch: Any) -> Any:
        """Return the model's outputs for `batch` without its targets."""
        if isinstance(batch, Mapping):
            target = self.target_name(batch)
            return self._called(model, {name: value for name, value in batch.items() if name != target})
        if isinstance(batch, (tuple, list)):
            return model(*(batch[:-1] if len(batch) > 1 else batch))
        return model(batch)

    def label_count(self, batch: Any) -> torch.Tensor | None:
        """Return the number of labels of `batch` that are not -100 if the model takes the global count, else None."""
        if not self.takes_count or not isinstance(batch, Mapping):
            return None
        return self._labels_that_count(batch)

    @property
    def form(self) -> dict[str, bool]:
        """The form of the loss that `settle` found, as JSON."""
        return {"takes_count": self.takes_count, "shifts": self._shifts, "counts": self.counts}

    @form.setter
    def form(self, form: Mapping[str, bool]) -> None:
        self.takes_count, self._shifts = bool(form["takes_count"]), bool(form["shifts"])
        self.counts = bool(form.get("counts", False))

    def probe(self, model: torch.nn.Module, batch: Any) -> dict[str, float]:
        """Return this rank's votes for `settle` on how the model computes its own loss.

        The model is tried out on `batch` in eval mode, without side effects. A rank whose batch holds no label
        abstains.
        """
        votes = dict.fromkeys(("takes count", "shifts", "does not shift", "counts"), 0.0)
        votes["counts"] = float(self._needs_count(batch))
        if self._training_step or self._loss_fn or not isinstance(batch, Mapping):
            return votes
        count = self._labels_that_count(batch)
        if count is None or count == 0:
            return votes
        was_training = model.training
        model.eval()
        with torch.no_grad():
            if (labels := batch["labels"]).dim() > 1:
                votes |= self._probe_shift(model, batch, labels)
            if _accepts_count(model):
                once = self._own_loss(model(**batch, num_items_in_batch=count))
                twice = own_loss(model(**batch, num_items_in_batch=2 * count))
                if once is not None and twice is not None:
                    votes["takes count"] = float(torch.allclose(once, 2 * twice, rtol=1e-3))
        model.train(was_training)
        return votes

    def _needs_count(self, batch: Any) -> bool:
        if self._training_step is not None or (self._loss_fn is not None and self._class_loss is None):
            return False
        if isinstance(batch, Mapping):
            targets = batch.get(self.target_name(batch))
        else:
            targets = batch[-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
        return (self._class_loss or ClassLoss(F.cross_entropy)).needs_count(targets)

    def _probe_shift(self, model: torch.nn.Module, batch: Mapping[str, Any], labels: torch.Tensor) -> dict[str, float]:
        """Vote on whether the loss ignores the first label of each row.

        The loss of a model that predicts the next token ignores it.
        """
        without = labels.clone()
        without[..., 0] = -100
        if torch.equal(without, labels) or without.ne(-100).sum() == 0:
            return {}
        whole = own_loss(self._called(model, batch))
        rest = own_loss(self._called(model, {**batch, "labels": without}))
        if whole is None or rest is None or whole.dim() != 0 or not bool(torch.isfinite(whole)):
            return {}
        return {"shifts" if torch.equal(whole, rest) else "does not shift": 1.0}

    def settle(self, votes: Mapping[str, float]) -> None:
        """Choose the form of the loss from `votes`, the sum of the results of `probe` over all ranks."""
        self.takes_count = votes["takes count"] > 0
        self.counts = votes["counts"] > 0
        if votes["shifts"] or votes["does not shift"]:
            self._shifts = not votes["does not shift"]

    # ------------------------------------------------------------------ forms

    def _from_mapping(
        self, model: Callable[..., Any], batch: Mapping[str, Any], num_items: torch.Tensor | None
    ) -> Loss:
        """Return the loss of a batch of named tensors, computed by `loss_fn` or by the model itself."""
        if self._loss_fn is not None:
            name = self.target_name(batch)
            if name is None:
                keys = ", ".join(map(str, batch))
                raise ConfigError(
                    f"the batch has the keys {keys} and none of {', '.join(TARGET_NAMES)}, so loss_fn has no targets:"
                    " rename one, or use training_step(model, batch)"
                )
            named = {key: value for key, value in batch.items() if key != name}
            return self.compare(self._called(model, named), batch[name])
        if num_items is not None:
            outputs = model(**batch, num_items_in_batch=num_items)
            loss = self._own_loss(outputs)
            if loss is None:
                raise ConfigError("the model returned no .loss for a batch of named tensors: " + _EXAMPLE)
            labels = batch.get("labels")
            local = self._labels_that_count(batch)
            assert local is not None
            return Loss(loss * num_items, local, outputs, labels)
        outputs = self._called(model, batch)
        loss = self._own_loss(outputs)
        if loss is None:
            raise ConfigError("the model returned no .loss for a batch of named tensors: " + _EXAMPLE)
        return dataclasses.replace(self._weigh(loss, batch), outputs=outputs, targets=batch.get("labels"))

    def _called(self, model: Callable[..., Any], named: Mapping[str, Any]) -> Any:
        """Return `model(**named)`. Raise ConfigError if the model's forward does not take one of the names."""
        try:
            return model(**named)
        except TypeError as error:
            takes = inspect.signature(self._plain.forward).parameters
            takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
            unknown = [name for name in named if name not in takes and not takes_any]
            if not unknown:
                raise
            only_targets = self._loss_fn is None and set(unknown) <= set(TARGET_NAMES)
            way = f"pass loss_fn=..., which gets {unknown[0]!r}" if only_targets else "rename them as its arguments"
            raise ConfigError(
                f"the batch has {', '.join(map(repr, unknown))}, but forward({', '.join(takes)}) of {type(self._plain).__name__} does not:"
                f" a batch of named tensors is passed as model(**batch), so {way}, or give a training_step(model, batch)"
            ) from error

    def _step(self, model: Callable[..., Any], batch: Any) -> Any:
        assert self._training_step is not None
        try:
            return self._training_step(model, batch)
        except (AttributeError, TypeError) as error:
            if model is self._plain or not str(error).startswith(f"'{type(model).__name__}' object "):
                raise
            raise ConfigError(
                f"training_step uses a part of `model`, which is wrapped on several processes ({error}): only model(...)"
                " exchanges gradients. Let the model's forward call the part, chosen by an argument"
            ) from error

    def _from_step(self, value: Any, batch: Any) -> Loss:
        """Return the loss in the result `value` of a `training_step`, with the metrics beside it."""
        metrics: Mapping[str, Any] | None = None
        own = self._own_loss(value) if hasattr(value, "loss") else None
        if own is not None:  # checked first: a Hugging Face output is also a mapping
            return self._weigh(own, batch)
        if isinstance(value, Mapping):
            if "loss" not in value:
                raise ConfigError(
                    f"training_step returned the keys {', '.join(map(str, value))} without 'loss': add it"
                )
            metrics = {name: entry for name, entry in value.items() if name != "loss"}
            check_names(metrics)
            value = value["loss"]
        if value is None:
            raise ConfigError("training_step returned None: return the loss")
        return dataclasses.replace(as_loss(value), metrics=metrics)

    def _own_loss(self, outputs: Any) -> torch.Tensor | None:
        """Return the model's own loss, and report a loss that is less precise than its model.

        The unscaled loss is examined, because dividing it by a float64 count would hide its element type.
        """
        loss = own_loss(outputs)
        if loss is not None and self._is_float64 and loss.dtype != torch.float64:
            kind = str(loss.dtype).removeprefix("torch.")
            self._notice_once(
                f"the model is float64 and computes its own loss in {kind}: results at different numbers of processes"
                " agree to about 1e-7 only; a training_step can compute it in float64"
            )
        return loss

    def _weigh(self, loss: torch.Tensor, batch: Any) -> Loss:
        """Return the model's own mean loss and its weight: the number of labels, or of samples without labels."""
        if loss.dim() != 0:
            return as_loss(loss)
        count = self._labels_that_count(batch) if isinstance(batch, Mapping) else None
        if count is None:
            self._notice_once("the model's own loss is taken as a mean over samples")
            return Loss(loss, None)
        self._notice_once("the model's own loss is weighted by the number of labels that are not -100")
        # For a batch without labels the model returns 0/0. Such a batch gets weight 0.
        return Loss(torch.where(count > 0, loss, torch.zeros_like(loss)) * count, count)

    def _labels_that_count(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        labels = batch.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            return None
        return (labels[..., 1:] if self._shifts and labels.dim() > 1 else labels).ne(-100).sum()

    def _choose_default(self, outputs: Any, targets: Any) -> Callable[..., torch.Tensor]:
        if isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor):
            if is_class_index(outputs, targets) and outputs.shape[1] > 1:
                self._notice_once("no loss_fn given: cross-entropy, because the targets are class indices")
                return F.cross_entropy
            if targets.is_floating_point() and outputs.shape == targets.shape:
                self._notice_once(
                    "no loss_fn given: mean squared error, because the targets are floats of the outputs' shape"
                )
                return F.mse_loss
        raise ConfigError(
            f"no loss_fn given, and outputs {_shape(outputs)} with targets {_shape(targets)} do not determine a loss: "
            + (_near_miss(outputs, targets) or _EXAMPLE)
        )

    def _notice_once(self, text: str) -> None:
        if text not in self._noticed:
            self._noticed.add(text)
            self._notice(text)


def own_loss(outputs: Any) -> torch.Tensor | None:
    """Return the loss inside a model's outputs (`.loss` or ["loss"]), or None."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return loss if isinstance(loss, torch.Tensor) else None


def is_class_index(outputs: Any, targets: Any) -> bool:
    """Return whether `outputs` are scores [batch, classes] and `targets` are class indices [batch]."""
    return (
        isinstance(outputs, torch.Tensor)
        and isinstance(targets, torch.Tensor)
        and outputs.dim() == 2
        and outputs.is_floating_point()
        and targets.dim() == 1
        and targets.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
    )


def _are_classes(targets: Any) -> bool:
    return isinstance(targets, torch.Tensor) and not targets.is_floating_point()


def scores(outputs: Any) -> Any:
    """Return the scores inside a model's outputs (`.logits` or ["logits"], as in Hugging Face), or the outputs themselves."""
    return outputs.get("logits", outputs) if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (number of correct answers, number of samples).

    Shapes are [batch, classes] for `outputs` and [batch] for `targets`, or both with additional dimensions. Negative class
    indices are not counted.
    """
    return (outputs.argmax(dim=1) == targets).sum(), (targets >= 0).sum()


def evaluate_metrics(
    metrics: Mapping[str, Callable[..., Any]], outputs: Any, targets: Any, num_samples: int, *, default: bool
) -> list[tuple[str, Any, float, Any]]:
    """Return (name, value, scale, count) of every metric, as in `StepResult.averages`. `default` adds the accuracy."""
    averages: list[tuple[str, Any, float, Any]] = []
    for name, function in metrics.items():
        averages.append((name, *weighted(as_loss(function(outputs, targets), name), num_samples, name)))
    if default and is_class_index(scores(outputs), targets):
        averages.append(("accuracy", *weighted(as_loss(accuracy(scores(outputs), targets)), num_samples, "accuracy")))
    return averages


def weighted(loss: Loss, num_samples: int, name: str) -> tuple[Any, float, Any]:
    """Return (value, scale, count) of a mean over `num_samples`, or of a (sum, count)."""
    if loss.value.numel() != 1:
        raise TrainingError(f"metric {name!r} gave a tensor of shape {tuple(loss.value.shape)} as a sum: give a number")
    value = loss.value.detach()
    return (value, float(num_samples), num_samples) if loss.count is None else (value, 1.0, loss.count)


def _shifts_by_name(model: torch.nn.Module) -> bool:
    """Return whether the model's name says that it predicts the next token. A result of `probe` takes precedence."""
    kind = str(getattr(model, "loss_type", None) or type(model).__name__)
    return "CausalLM" in kind or kind.endswith("LMHeadModel")


def _accepts_count(model: torch.nn.Module) -> bool:
    """Return whether the model takes `num_items_in_batch`, by the rule of Hugging Face's Trainer.

    If `accepts_loss_kwargs` is set, it decides. Otherwise `forward` must have that argument or take any keyword argument.
    """
    stated = getattr(model, "accepts_loss_kwargs", None)
    if stated is not None:
        return bool(stated)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(p.name == "num_items_in_batch" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _near_miss(outputs: Any, targets: Any) -> str:
    """Return what to change if the shapes almost match one of the default losses, else ""."""
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        return ""
    if is_class_index(outputs, targets):
        return (
            "one output column cannot hold class scores: give the model one column per class, or make the targets floats"
            " and pass a loss_fn such as a sigmoid with binary_cross_entropy_with_logits"
        )
    if outputs.dim() == 2 and targets.dim() == 2 and targets.shape[1] == 1 and is_class_index(outputs, targets[:, 0]):
        return "squeeze the class indices, targets.squeeze(1), in the data set"
    if not targets.is_floating_point() and outputs.shape == targets.shape:
        return "make the targets floats, targets.float(), for the mean squared error, or pass a loss_fn"
    if outputs.dim() == targets.dim() + 1 and outputs.shape[-1] == 1 and outputs.shape[:-1] == targets.shape:
        return "squeeze the outputs, outputs.squeeze(-1), in the model, or unsqueeze the targets, targets.unsqueeze(-1)"
    if targets.dim() == outputs.dim() + 1 and targets.shape[-1] == 1 and targets.shape[:-1] == outputs.shape:
        return (
            "squeeze the targets, targets.squeeze(-1), in the data set, or unsqueeze the outputs, outputs.unsqueeze(-1)"
        )
    return ""


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
