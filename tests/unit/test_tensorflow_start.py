"""What is known of a worker and its script before TensorFlow is imported, which it is not here."""

from __future__ import annotations

import os
import sys

import pytest

from distributed import Trainer
from distributed.backends._tensorflow.scripts import refuse_torch_script
from distributed.backends._tensorflow.start import _own_host, set_environment
from distributed.backends.keras_scripts import check_keras_backend, environ_for
from distributed.config.merging import Overrides
from distributed.config.registry import REGISTRY
from distributed.errors import ConfigError, ResourceError
from distributed.launcher.start import launch_request
from distributed.launching.environments.base import WorkerEnvironment
from tests.conftest import needs_backend
from tests.unit.test_listening import needs_ipv6


def worker(local_rank, world=2):
    return WorkerEnvironment(local_rank, local_rank, world, world, 0, "127.0.0.1", 1, 0, "environment")


@pytest.mark.parametrize(("visible", "own"), [("", "1"), ("4,5", "5"), ("GPU-a, GPU-b", "GPU-b")])
def test_a_worker_sees_its_own_gpu(monkeypatch, visible, own):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    set_environment(worker(1), "cuda")
    set_environment(worker(1), "cuda")  # before the script, and by its Trainer
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own


@pytest.mark.parametrize(
    ("master_addr", "own"), [("127.0.0.1", "127.0.0.1"), pytest.param("::1", "[::1]", marks=needs_ipv6)]
)
def test_a_worker_is_reached_over_the_way_to_rank_0(master_addr, own):
    assert _own_host(WorkerEnvironment(1, 0, 2, 1, 1, master_addr, 29500, 0, "environment")) == own


def test_a_worker_without_a_gpu_of_its_own_is_told_how_many_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ResourceError, match=r"CUDA_VISIBLE_DEVICES='3' names 1 GPU, and worker 1 .* nproc_per_node=1"):
        set_environment(worker(1), "cuda")


def test_one_process_sees_all_gpus_and_a_run_on_cpus_none(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    set_environment(worker(0, world=1), "cuda")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    set_environment(worker(1), "cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"


TORCH = [
    "import torch.nn\n",
    "from torch import nn\n",
    "from torch.nn import Linear\n",
    "import torch\nmodel = torch.nn.Linear(2, 1)\n",
    "from net import Net\n",
]
NOT_TORCH = [
    "import keras\nimport torch.nn\n",
    "from torch.utils.data import DataLoader\n",
    "from torch import nn\nfrom models import make\n",
    "def f():\n    import tensorflow as tf\nfrom torch import nn\n",
    "this is no Python",
]


@pytest.fixture
def script(tmp_path):
    (tmp_path / "net.py").write_text("from torch import nn\nimport main\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("from keras import layers\n")
    return tmp_path / "main.py"


@pytest.mark.parametrize("text", TORCH)
def test_a_script_of_torch_is_known_by_what_it_and_its_neighbours_import(script, text):
    script.write_text(text)
    with pytest.raises(ConfigError, match="makes torch models and imports neither keras nor tensorflow"):
        refuse_torch_script(script)


@pytest.mark.parametrize("text", NOT_TORCH)
def test_a_script_that_may_have_a_keras_model_is_let_through(script, text):
    script.write_text(text)
    refuse_torch_script(script)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [("foo", r"is none of tensorflow, torch, jax, "), ("openvino", "is not installed")],
)
def test_a_keras_backend_that_is_not_here_is_refused_where_the_script_imports_keras(script, monkeypatch, chosen, said):
    monkeypatch.setenv("KERAS_BACKEND", chosen)
    script.write_text("import models")
    with pytest.raises(ConfigError, match=f"KERAS_BACKEND='{chosen}' {said}.* imports keras: set KERAS_BACKEND=torch"):
        check_keras_backend(script, REGISTRY["pytorch-ddp"].environ)
    script.write_text("import torch")
    check_keras_backend(script, REGISTRY["pytorch-ddp"].environ)
    script.write_text("import models")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    check_keras_backend(script, REGISTRY["pytorch-ddp"].environ)


def test_a_model_or_optimizer_of_torch_is_refused_without_tensorflow():
    needs_backend("tensorflow")
    torch = pytest.importorskip("torch")
    loaded = "tensorflow" in sys.modules
    model = torch.nn.Linear(2, 1)
    with pytest.raises(
        ConfigError, match=r"the model is a torch object \(Linear\), but backend='tensorflow' trains Keras models"
    ):
        Trainer(model, backend="tensorflow")
    with pytest.raises(ConfigError, match=r"the optimizer is a torch object \(SGD\)"):
        Trainer(lambda: None, backend="tensorflow", optimizer=torch.optim.SGD(model.parameters(), 0.1))
    assert ("tensorflow" in sys.modules) == loaded


@pytest.mark.parametrize(
    ("source", "engine"),
    [
        ("import horovod.tensorflow.keras as hvd\nimport keras\n", None),
        ("import keras\n", None),
        ("import keras\nfrom distributed import Trainer\n", "torch"),
        ("import helper\n", "torch"),  # which imports this package
        ("import torch.distributed\n", None),
    ],
)
def test_a_script_without_a_trainer_finds_the_engine_that_it_is_written_for(source, engine, tmp_path):
    (tmp_path / "helper.py").write_text("import distributed\n")
    (tmp_path / "plain.py").write_text(source)
    environ = {"KERAS_BACKEND": "torch", "OTHER": "1"}
    assert environ_for(tmp_path / "plain.py", environ) == (
        {"OTHER": "1"} | ({} if engine is None else {"KERAS_BACKEND": engine})
    )
    on_tensorflow = REGISTRY["tensorflow"].environ
    assert environ_for(tmp_path / "plain.py", on_tensorflow) == on_tensorflow


@pytest.mark.parametrize(
    ("source", "engine"), [("import keras\n", None), ("from distributed import Trainer\n", "torch")]
)
def test_the_workers_of_a_command_get_it(source, engine, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    overrides = Overrides(flag={"backend": "pytorch-ddp", "nproc_per_node": 2, "device": "cpu"}, script="train.py")
    assert launch_request(overrides, None).environ.get("KERAS_BACKEND") == engine
