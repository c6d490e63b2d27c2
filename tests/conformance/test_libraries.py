"""A library of a backend is missing, broken, or hidden by a file of the user: one line tells what to do, and nothing is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import needs_backend

ROOT = Path(__file__).parent.parent.parent
TORCH_SCRIPT = """
import torch

from distributed import Trainer

x = torch.randn(64, 4)
trainer = Trainer(torch.nn.Linear(4, 1), loss_fn=torch.nn.MSELoss())
trainer.fit(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), epochs=1)
"""
KERAS_SCRIPT = "import keras\n" + TORCH_SCRIPT  # never runs, because the workers import TensorFlow first
SCRIPTS = {"tensorflow": KERAS_SCRIPT}
BROKEN = {"{library}/__init__.py": "raise ImportError('libx.so: undefined symbol: _ZN2at\\nand more of it')"}
HOROVOD_OF_ANOTHER_TORCH = {
    "horovod/__init__.py": "import pkgutil; __path__ = pkgutil.extend_path(__path__, __name__)",
    "horovod/torch.py": "raise ImportError('mpi_lib_v2.so: undefined symbol: _ZN2at')",
}
MISSING = {  # a finder that comes first and does not find the library
    "sitecustomize.py": """
import importlib.machinery as m
find = m.PathFinder.find_spec
m.PathFinder.find_spec = lambda name, *more: None if name.partition(".")[0] == "{library}" else find(name, *more)
"""
}
EXTRA = {name: f"distributed-trainer[{name}]" for name in ("deepspeed", "ray", "tensorflow")}
INSTALL = {name: f"pip install '{extra}'" for name, extra in EXTRA.items()} | {
    "horovod": "'make horovod' (builds it for the installed torch)"
}
CASES = [
    *(
        pytest.param(name, MISSING, f"needs {name}, which is not installed: run {INSTALL[name]}", id=f"{name}-missing")
        for name in INSTALL
    ),
    *(
        pytest.param(
            name,
            BROKEN,
            f"needs {name}, which is installed but does not load (ImportError: libx.so: undefined symbol: _ZN2at):"
            f" run pip install --force-reinstall '{extra}'",
            id=f"{name}-broken",
        )
        for name, extra in EXTRA.items()
    ),
    pytest.param("horovod", HOROVOD_OF_ANOTHER_TORCH, "horovod was built for another torch than", id="horovod-broken"),
    *(
        pytest.param(
            name, {"{library}.py": ""}, f"{name}.py hides the library {name}: rename that file", id=f"{name}-hidden"
        )
        for name in INSTALL
    ),
]


@pytest.mark.parametrize(("library", "files", "said"), CASES)
def test_a_library_that_cannot_be_used_is_one_line(run_cli, tmp_path, library, files, said):
    needs_backend(library)
    for name, content in files.items():
        file = tmp_path / name.replace("{library}", library)
        file.parent.mkdir(exist_ok=True)
        file.write_text(content.replace("{library}", library))
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS.get(library, TORCH_SCRIPT))
    command = ["train", "--script", str(script), "--backend", library, "--nproc-per-node", "2"]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run_cli([*command, "--run-dir", str(tmp_path / "run")], env={"PYTHONPATH": path}, timeout=180)
    assert done.returncode == 3, done.output
    assert said in done.stderr and "Traceback" not in done.output, done.output
    assert done.stderr.count("\n") == 1, done.stderr
