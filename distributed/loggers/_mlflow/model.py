"""A model as MLflow keeps it, without a pickle: its weights by name, a description of them, and a program that computes it."""

from __future__ import annotations

import contextlib
import datetime
import json
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WEIGHTS, DESCRIPTION, PROGRAM = "model.safetensors", "model.json", "model.pt2"


@contextlib.contextmanager
def staged_model(
    checkpoint: Path, model_class: str, run_id: str, program: Path | None = None, loader: str = ""
) -> Iterator[Path]:
    """Yield a directory with the weights of `checkpoint`, their description, and the MLmodel file that MLflow
    looks for. If there is a `program` of the model, `mlflow.pyfunc` runs it with the module called `loader`.
    """
    from distributed.checkpoints.manifest import read_manifest
    from distributed.checkpoints.shards import read_weights
    from distributed.checkpoints.tensor_file import write_tensors
    from distributed.runs.temporary import temporary_directory

    tensors = read_weights(checkpoint)
    manifest = read_manifest(checkpoint)
    description: dict[str, Any] = {
        "model_class": model_class, "weights": WEIGHTS, "step": manifest.step, "epoch": manifest.epoch,
        "tensors": {tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape)} for tensor in tensors},
    }  # fmt: skip
    with temporary_directory() as directory:
        write_tensors(directory / WEIGHTS, tensors, {"format": "pt"})
        (directory / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        if program is not None and program.exists():
            shutil.copyfile(program, directory / PROGRAM)
        else:
            loader = ""
        (directory / "MLmodel").write_text(_mlmodel(model_class, run_id, loader), encoding="utf-8")
        yield directory


def _mlmodel(model_class: str, run_id: str, loader: str) -> str:
    """Return the text of the file MLmodel.

    MLflow loads the flavor "python_function", which is there if there is a program. It does not load "safetensors" by itself.
    """
    import yaml
    from mlflow import __version__

    flavor = {"weights": WEIGHTS, "description": DESCRIPTION, "model_class": model_class}
    made = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
    running = {"loader_module": loader, "data": PROGRAM, "python_version": platform.python_version()}
    content = {
        "flavors": {**({"python_function": running} if loader else {}), "safetensors": flavor},
        "mlflow_version": __version__,
        "run_id": run_id,
        "utc_time_created": made,
    }
    return str(yaml.safe_dump(content, sort_keys=False))
