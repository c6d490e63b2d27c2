"""Build the optimizer that settings name for Keras models, with the updates that torch's optimizers make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distributed.config.optimization import NamedOptimizer
from distributed.errors import ConfigError

_DECAYS_GRADIENT = ("adam", "sgd")  # torch adds the decay to the gradient; Keras would subtract it from the weights


def named_optimizer(wanted: NamedOptimizer, variables: Mapping[str, Any], notice: Callable[[str], None]) -> Any:
    """Return the Keras optimizer for the trainable `variables`, given as name -> variable. The names have dots, not slashes.

    Raises ConfigError for a setting that Keras does not support, and if an entry of `layer_rates` applies to no variable.
    """
    import keras

    name, decay = wanted.name, wanted.weight_decay
    if name == "muon":
        raise ConfigError(
            "optimizer='muon' does not work with Keras models: choose adamw, or pass keras.optimizers.Muon(...)"
        )
    wanted.check_starts([*variables])
    arguments: dict[str, Any] = {"learning_rate": wanted.learning_rate}
    if name in ("adamw", "adam"):
        arguments["epsilon"] = 1e-8  # as in torch
        if wanted.betas is not None:
            arguments["beta_1"], arguments["beta_2"] = wanted.betas
    if name == "sgd" and wanted.momentum is not None:
        arguments["momentum"] = wanted.momentum
    if name == "adafactor":
        arguments["relative_step"] = False  # the rate is learning_rate, and not computed from the number of updates
    in_gradient = decay if name in _DECAYS_GRADIENT else 0.0
    kept = [variable for variable in variables.values() if not wanted.decay_of(len(variable.shape))]
    if not in_gradient and len(kept) < len(variables):
        arguments["weight_decay"] = decay
    kinds = keras.optimizers
    kind = {"adamw": kinds.AdamW, "adam": kinds.Adam, "sgd": kinds.SGD, "adafactor": kinds.Adafactor}[name]
    if wanted.layer_rates or in_gradient:
        kind = _by_variable(kind, wanted, variables, in_gradient)
    optimizer = kind(**arguments)
    if "weight_decay" in arguments:
        optimizer.exclude_from_weight_decay(var_list=kept)
    if text := wanted.decay_notice([len(variable.shape) for variable in variables.values()]):
        notice(text)
    return optimizer


def _by_variable(kind: type, wanted: NamedOptimizer, variables: Mapping[str, Any], in_gradient: float) -> type:
    """Return a subclass of `kind` that applies a rate and a decay to each variable. `in_gradient` is the decay added to gradients.

    The variables with one rate are updated together, by Keras's own update.
    """
    import keras

    factors = {id(variable): wanted.factor(name) for name, variable in variables.items()}

    class ByVariable(kind):  # type: ignore[misc]
        """Optimizer that updates the variables of each rate together."""

        _factor = 1.0

        def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
            by_rate: dict[float, list[tuple[Any, Any]]] = {}
            for gradient, variable in zip(grads, trainable_variables, strict=True):
                if in_gradient and wanted.decay_of(len(variable.shape)):
                    gradient = keras.ops.add(gradient, variable.value * in_gradient)
                by_rate.setdefault(factors[id(variable)], []).append((gradient, variable))
            attributes: Any = vars(self)  # bypasses Keras's __setattr__, which tracks attributes
            for factor, pairs in by_rate.items():
                attributes["_factor"] = factor
                super()._backend_apply_gradients(*map(list, zip(*pairs, strict=True)))
            del attributes["_factor"]

        def _apply_weight_decay(self, variables: Any) -> None:
            # Workaround (Keras 3.15, no upstream issue known; may go when Keras takes variables of which none decays): on torch
            # this fails.
            if decaying := [variable for variable in variables if wanted.decay_of(len(variable.shape))]:
                super()._apply_weight_decay(decaying)

        def _get_current_learning_rate(self) -> Any:
            rate = super()._get_current_learning_rate()
            return rate if self._factor == 1.0 else rate * self._factor

    ByVariable.__name__ = ByVariable.__qualname__ = kind.__name__  # as it is named in checkpoints
    return ByVariable
