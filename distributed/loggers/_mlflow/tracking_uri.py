"""Find the tracking URI of a run: the URI that the user set, or that of an SQLite file beside the run directories."""

from __future__ import annotations

import os
import re
import sys
import urllib.parse
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.config.libraries import check_not_hidden, is_installed
from distributed.errors import ConfigError, ResourceError, nearest

if TYPE_CHECKING:
    from distributed.config.merging import MergedConfig

URI, RUN_ID = "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"
_SERVERS, _DATABASES = ("http", "https"), ("sqlite", "mysql", "postgresql", "mssql")
_INSTALL = "pip install 'distributed-trainer[mlflow]'"
REINSTALL = "pip install --force-reinstall 'distributed-trainer[mlflow]'"

# Ids of runs that this process itself put into MLFLOW_RUN_ID. The user did not ask to join these runs.
given_out: set[str] = set()


def check(merged: MergedConfig) -> None:
    """Raise ResourceError for a missing library, and ConfigError for a URI or a model name that MLflow does not accept.

    Whether a server answers is not checked, because training does not need the server.
    """
    uri = users_uri()
    _require("mlflow")
    if uri is None or _scheme(uri) in _DATABASES:
        _require("sqlalchemy")
    if uri is not None:
        check_uri(uri)
    model = merged.config.mlflow_register_model
    if model is not None and re.search(r"[/:]|^\s*$|^\.+$", model):
        raise ConfigError(f"mlflow_register_model={model!r} is not a valid name in MLflow: remove '/' and ':'")
    if model is not None and merged.config.checkpoint_trainable_only:
        raise ConfigError(
            f"mlflow_register_model={model!r} registers the weights of a checkpoint, which lacks the frozen ones with"
            " checkpoint_trainable_only=True: drop one of them"
        )


def users_uri() -> str | None:
    """Return the tracking URI that the user set by `mlflow.set_tracking_uri` or by MLFLOW_TRACKING_URI, or None."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and hasattr(mlflow, "is_tracking_uri_set") and mlflow.is_tracking_uri_set():
        return str(mlflow.get_tracking_uri())
    return os.environ.get(URI) or None


def users_run() -> tuple[str, str | None] | None:
    """Return (id, tracking URI) of the run that the user has open here, or that MLFLOW_RUN_ID names, or None."""
    if has_open_run():
        mlflow: Any = sys.modules["mlflow"]
        return str(mlflow.active_run().info.run_id), str(mlflow.get_tracking_uri())
    run_id = os.environ.get(RUN_ID)
    return (run_id, users_uri()) if run_id and run_id not in given_out else None


def has_open_run() -> bool:
    """Return whether the user has a run open in this process."""
    mlflow = sys.modules.get("mlflow")
    return mlflow is not None and hasattr(mlflow, "active_run") and mlflow.active_run() is not None


def environ_of_open_run(merged: MergedConfig) -> dict[str, str]:
    """Return the variables by which workers join the run that the user has open in this process."""
    found = users_run()
    if found is None:
        return {}
    run_id, uri = found
    return {RUN_ID: run_id} | ({} if uri is None else {URI: uri})


def beside(run_dir: Path) -> Path:
    """Return the directory that contains the run directory.

    Run directories can be nested: that of a second trainer in a process is inside that of the first trainer, and that of a trial
    is inside that of the sweep. The outermost one counts.
    """
    return (sweep_of(run_dir) or _first(run_dir)).parent


def sweep_of(run_dir: Path) -> Path | None:
    """Return the directory of the sweep of which this run is a trial, or None."""
    trials = _first(run_dir).parent
    return trials.parent if trials.name == "trials" and (trials.parent / "sweep.yaml").exists() else None


def _first(run_dir: Path) -> Path:
    """Return the run directory of the first trainer of its process."""
    path = run_dir.absolute()
    while re.fullmatch(r"fit-\d+", path.name) and (path.parent / "events.jsonl").exists():
        path = path.parent
    return path


def default_uri(run_dir: Path) -> str:
    """Return the URI of an SQLite file beside the run directories."""
    return f"sqlite:///{beside(run_dir) / 'mlflow.db'}"


def shown(uri: str) -> str:
    """Return the URI without a password, for messages and files."""
    parts = urllib.parse.urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    return uri if host == parts.netloc else uri.replace(parts.netloc, host, 1)


def lasting(uri: str) -> str:
    """Return the URI with an absolute path if it names an SQLite file, so that it is valid in any working directory."""
    path = file_of(uri)
    if path is None or path.is_absolute():
        return uri
    head, mark, options = uri.partition("?")
    return f"{head.partition(':///')[0]}:///{path.absolute()}{mark}{options}"


def file_of(uri: str) -> Path | None:
    """Return the file of an SQLite store, or None for another store and for SQLite's special names."""
    rest = uri.partition(":///")[2].partition("?")[0]
    return Path(rest) if _scheme(uri) == "sqlite" and rest and not rest.startswith((":", "file:")) else None


def is_remote(uri: str) -> bool:
    """Return whether the URI names a server and not an SQLite file."""
    return _scheme(uri) != "sqlite"


def check_uri(uri: str) -> None:
    """Raise ConfigError if MLflow cannot use `uri`."""
    scheme = _scheme(uri)
    if scheme in _SERVERS:
        _check_server(uri)
    elif scheme == "sqlite":
        _check_file(uri)
    elif uri in _plugins() or scheme in (*_DATABASES, *_plugins()):
        return
    elif scheme in ("", "file"):
        _check_directory(uri)
    else:
        known = (*_SERVERS, *_DATABASES, *_plugins())
        fix = f"write http://{uri}" if re.fullmatch(r"[\w.-]+:\d+(/.*)?", uri) else f"choose one of {', '.join(known)}"
        raise ConfigError(
            f"{URI}={shown(uri)!r} has the scheme {scheme!r}, which MLflow does not know{nearest(scheme, known)}: {fix}"
        )


def _check_server(uri: str) -> None:
    parts = urllib.parse.urlsplit(uri)
    try:
        is_whole = bool(parts.hostname) and (parts.port is None or parts.port > 0) and not re.search(r"\s", uri)
    except ValueError:  # the port is not a number
        is_whole = False
    if not is_whole:
        raise ConfigError(f"{URI}={shown(uri)!r} names no server: write http://HOST:PORT")


def _check_file(uri: str) -> None:
    path = uri.partition("?")[0].partition(":///")[2]
    if not path or path == ":memory:":
        raise ConfigError(f"{URI}={uri!r} names no file: write sqlite:///PATH/mlflow.db")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"{URI}={uri!r} is in a directory that does not exist: make it, or name another file")


def _check_directory(uri: str) -> None:
    if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
        raise ConfigError(
            f"{URI}={uri!r} is a directory of files, which MLflow no longer writes to: use a database,"
            " sqlite:///PATH/mlflow.db, or set MLFLOW_ALLOW_FILE_STORE=true"
        )


def _scheme(uri: str) -> str:
    return urllib.parse.urlsplit(uri).scheme.partition("+")[0]


def _plugins() -> tuple[str, ...]:
    found = entry_points(group="mlflow.tracking_store")
    return ("databricks", "databricks-uc", "uc", *sorted(each.name for each in found))


def _require(name: str) -> None:
    if not is_installed(name):
        raise ResourceError(f"mlflow_tracking=True needs {name}, which is not installed: run {_INSTALL}")
    check_not_hidden(name)
