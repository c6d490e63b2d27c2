"""Create a user's callbacks for Ray Train. They run in Ray's controller process and receive each epoch."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from distributed.errors import ConfigError
from distributed.launching.request import LaunchRequest


def made(names: str | None, request: LaunchRequest) -> list[Any]:
    """Return one object of each class in "module.Class, module.Class". Raises ConfigError if a class does not exist."""
    if not names:
        return []
    beside = [str(Path(request.script).resolve().parent)] if request.script else []
    sys.path.extend([*(request.sys_path or ()), *beside, str(Path.cwd())])
    return [_made(name.strip()) for name in names.split(",")]


def _made(name: str) -> Any:
    """Import the class `name` and return an object of it."""
    from ray import cloudpickle
    from ray.train import UserCallback

    module_name, _, class_name = name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
        cls = getattr(module, class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"ray.callbacks: {name!r} cannot be imported ({error}): write module.Class of a file beside the script, or of an"
            " installed package"
        ) from None
    if not (isinstance(cls, type) and issubclass(cls, UserCallback)):
        raise ConfigError(
            f"ray.callbacks: {name!r} is not a subclass of ray.train.UserCallback: derive it from that class"
        )
    cloudpickle.register_pickle_by_value(module)  # Ray's controller may run where the module cannot be imported
    return cls()
