"""Names in a checkpoint for the variables of a Keras model and a Keras optimizer. They are the same on every engine.

A variable of a model has its path as name ("dense/kernel"), seed generators included. Keras makes up layer names by
counting all layers of a process, so the same model may be "dense" here and "dense_1" there. A stored model is therefore
matched by path if all paths are equal, and otherwise by the order of its variables, which the model's file contains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distributed.errors import CheckpointError

Shape = tuple[int, ...]
_NOT_SLOTS = ("_variables", "_trainable_variables")  # attributes of an optimizer that are lists but hold no slots


def model_variables(model: Any) -> dict[str, Any]:
    """Return the variables of a built model by name, in its own order: weights, moving statistics, states of seed
    generators."""
    named: dict[str, Any] = {}
    for variable in model.variables:
        named[_free(variable.path.replace(".", "_"), named)] = variable
    return named


def _free(name: str, taken: Mapping[str, Any]) -> str:
    """Return `name`, with a number if it is taken: two layers of one name may have variables of one name."""
    free, number = name, 2
    while free in taken:
        free, number = f"{name}:{number}", number + 1
    return free


def seed_names(model: Any) -> set[str]:
    """Return the names in `model_variables` of the states of seed generators."""
    weights = {id(variable) for variable in model.weights}
    return {
        name
        for name, variable in model_variables(model).items()
        if id(variable) not in weights and tuple(variable.shape) == (2,) and "int" in str(variable.dtype)
    }


def optimizer_variables(optimizer: Any, names: Mapping[int, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the variables of a built optimizer as (slots, others).

    Slots are named "state.<parameter>.<slot>"; the others belong to no parameter. The number of updates and the
    learning rate are in neither.

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
    """Return the name of a slot. Keras names the variable "<path of the parameter>_momentum"; otherwise the
    attribute of the optimizer has the name."""
    prefix = parameter.path.replace("/", "_") + "_"
    return name.removeprefix(prefix) if name.startswith(prefix) else attribute.lstrip("_")


def is_variable(value: Any) -> bool:
    """Return True if `value` is a Keras variable of any engine."""
    return hasattr(value, "assign") and hasattr(value, "path") and hasattr(value, "numpy")


def matched(own: Mapping[str, Shape], stored: Mapping[str, Shape], order: Sequence[str], where: str) -> dict[str, str]:
    """Return own name -> stored name: by name if the names are equal, otherwise by position.

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
