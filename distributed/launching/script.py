"""Check a script before any process is started for it. Running it belongs to `worker`."""

from __future__ import annotations

import os
import traceback
import warnings
from pathlib import Path

from distributed.errors import ConfigError, ScriptError, nearest


def check_script(script: str) -> None:
    """Check that `script` can be run.

    Raises ConfigError if it is not a readable file (the message has the nearest name in the directory), and ScriptError if it
    does not compile.
    """
    path = Path(script)
    if path.is_file():
        if not os.access(path, os.R_OK):
            raise ConfigError(f"script {script!r} cannot be read: check its permissions")
        _check_syntax(script, path.read_bytes())
        return
    if path.is_dir():
        raise ConfigError(f"script {script!r} is a directory: name the file with --script")
    there = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
    hint = nearest(path.name, there)
    raise ConfigError(
        f"script {script!r} does not exist{hint}: check --script, the working directory is {str(Path.cwd())!r}"
    )


def _check_syntax(script: str, source: bytes) -> None:
    """Raise ScriptError with Python's own message if `source` does not compile. The workers show Python's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(source, script, "exec", dont_inherit=True)
        # Workaround (Python 3.11, python/cpython#96670; ValueError may go when Python 3.12 is the oldest supported one): Python
        # raises it for a null byte.
        except (SyntaxError, ValueError) as error:
            message = "".join(traceback.format_exception_only(error)).rstrip()
            raise ScriptError(f"script {script!r} does not compile:\n{message}") from None
        except (RecursionError, MemoryError):  # nested too deeply for the compiler: the workers will report it
            return
