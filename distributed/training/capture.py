"""Take the Trainer and its data out of a script: run the script up to its first `Trainer.fit`, without training."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.errors import ConfigError
from distributed.launching.script import check_script

if TYPE_CHECKING:
    from distributed.training.fits import Fits


class Captured(BaseException):
    """Raised by the first `fit` of a script that `captured_fit` runs. `except Exception` in the script does not catch it."""

    def __init__(self, fits: Fits, train_data: Any) -> None:
        super().__init__("the fit was captured")
        self.fits, self.train_data = fits, train_data


class _Capture:
    is_on = False


def offer(fits: Fits, train_data: Any) -> None:
    """Raise Captured if `captured_fit` runs the script. Called at the start of each fit."""
    if _Capture.is_on:
        raise Captured(fits, train_data)


def captured_fit(script: str, arguments: Sequence[str]) -> Captured:
    """Run `script` as `__main__` in this process, up to its first `Trainer.fit`, and return that fit.

    Raises ConfigError if the script cannot be run, or ends without a fit.
    """
    check_script(script)
    argv, path = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [script, *arguments], [str(Path(script).parent.absolute()), *sys.path]
    _Capture.is_on = True
    try:
        runpy.run_path(script, run_name="__main__")
    except Captured as found:
        return found
    except SystemExit as error:
        raise ConfigError(
            f"script {script!r} ended with {error.code!r} before Trainer.fit(): pass its arguments after --"
        ) from None
    finally:
        _Capture.is_on = False
        sys.argv, sys.path[:] = argv, path
    raise ConfigError(f"script {script!r} ended without a call of Trainer.fit(), whose model and data are needed")
