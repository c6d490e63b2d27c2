"""Name the variables of a Keras model and a Keras optimizer in a checkpoint. The names are the same on every engine.

The name of a model's variable is its path ("dense/kernel"); this includes the states of seed generators. Keras
generates layer names by counting all layers of a process, so a layer may be "dense" in one process and "dense_1" in
another. The variables of a stored model are therefore matched by path if all paths are equal, and otherwise by their
order, which the model's file contains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distributed.errors import CheckpointError

Shape = tuple[int, ...]
_NOT_SLOTS = ("_variables", "_trainable_variables")  # attributes of an optimizer that are lists but hold no slots


def model_variables(model: Any) -> dict[str, Any]:
    """Return the variables of a built model by name, in the order of `model.variables`: weights, moving statistics,
    states of seed generators."""
    named: dict[str, Any] = {}
    for variable in model.variables:
        named[_free(variable.path.replace(".", "_"), named)] = variable
    return named


def trainable_variables(model: Any) -> dict[str, Any]:
    """Return the trainable variables of a built model by the names that settings and callbacks use, such as "dense.kernel".

    The name of the model is left out, because Keras generates it.
    """
    names = {id(variable): name for name, variable in model_variables(model).items()}
    short = (names[id(each)].removeprefix(f"{model.name}/").replace("/", ".") for each in model.trainable_variables)
    return dict(zip(short, model.trainable_variables, strict=True))


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """Return `name`, with a number added if it is in `taken`. Variables have equal names if their layers do."""
    free, number = name, 2
    while free in taken:
        free, number = f"{name}:{number}", number + 1
    return free


def seed_names(model: Any) -> set[str]:
    """Return the names that `model_variables` gives to the states of seed generators."""
    weights = {id(variable) for variable in model.weights}
    return {
        name
        for name, variable in model_variables(model).items()
        if id(variable) not in weights and tuple(variable.shape) == (2,) and "int" in str(variable.dtype)
    }


def optimizer_variables(optimizer: Any, names: Mapping[int, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the variables of a built optimizer as (slots, others).

    Slots are named "state.<parameter>.<slot>"; the other variables belong to no parameter. Neither dict contains the
    number of updates or the learning rate.

    Args:
        names: names of the model's variables by their id.
    """
    slots: dict[str, Any] = {}
    own: dict[str, Any] = {}
    known = {id(variable) for variable in optimizer.variables}
    trained = list(optimizer._trainable_variables)
    own_rate = getattr(optimizer, "_learning_rate", None)
    for attribute, value in vars(optimizer).items():
        if attribute in _NOT_SLOTS:
            continue
        if isinstance(value, list) and len(value) == len(trained):
            for parameter, variable in zip(trained, value, strict=True):
                if id(variable) in known:
                    slot = _slot(variable.name, parameter, attribute)
                    slots[f"state.{names[id(parameter)]}.{slot}"] = variable
        elif is_variable(value) and value is not own_rate and value is not optimizer._iterations:
            own[attribute.lstrip("_")] = value
    return slots, own


def _slot(name: str, parameter: Any, attribute: str) -> str:
    """Return the name of a slot, such as "momentum". It is what follows the parameter's path in the name of the
    variable, or else the name of the optimizer's attribute."""
    prefix = parameter.path.replace("/", "_") + "_"
    return name.removeprefix(prefix) if name.startswith(prefix) else attribute.lstrip("_")


def is_variable(value: Any) -> bool:
    """Return True if `value` is a Keras variable of any engine."""
    return hasattr(value, "assign") and hasattr(value, "path") and hasattr(value, "numpy")


def matched(own: Mapping[str, Shape], stored: Mapping[str, Shape], order: Sequence[str], where: str) -> dict[str, str]:
    """Return own name -> stored name for each variable: by name if all names are equal, otherwise by position.

    Args:
        order: names of the stored variables in their order.

    Raises:
        CheckpointError: the numbers of variables or their shapes differ.
    """
    theirs = [name for name in order if name in stored] if set(order) == set(stored) else list(stored)
    pairs = {name: name for name in own} if own.keys() == stored.keys() else dict(zip(own, theirs, strict=False))
    different = [
        f"{name} is {list(own[name])} here, {other} is {list(stored[other])} in the checkpoint"
        for name, other in pairs.items()
        if own[name] != stored[other]
    ]
    if len(own) != len(stored):
        different.insert(0, f"{len(own)} variables here, {len(stored)} in the checkpoint")
    if different:
        raise CheckpointError(
            f"checkpoint {where} is of another model: {'; '.join(different[:2])}: build the model as it was saved,"
            " or start without the checkpoint"
        )
    return pairs
