"""docker/compose.yaml: its form, and its commands, which run here on one machine, in a clean directory. No container engine is used."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Finished, Started, free_port, poll

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker" / "compose.yaml"
COMPOSE = yaml.safe_load(FILE.read_text())
SERVICES = COMPOSE["services"]
NODES = ("node0", "node1")
SMALL = ["--", "--hidden-size", "32", "--attention-heads", "2", "--layers", "2", "--max-seq-length", "32"]
pytestmark = pytest.mark.timeout(600)


def validate(text: str) -> subprocess.CompletedProcess[str]:
    """Check a compose file against the schema of the Compose Specification."""
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        "--default-filetype",
        "yaml",
        "-",
    ]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_the_file_is_what_the_compose_specification_says() -> None:
    pytest.importorskip("check_jsonschema", reason="the extra dev has the schema")
    text = FILE.read_text()
    assert validate(text).returncode == 0, validate(text).stdout
    assert validate(text.replace("shm_size", "shm-size")).returncode == 1


def test_images_are_pinned_ports_are_local_and_the_secret_is_not_in_the_file() -> None:
    own = COMPOSE["x-node"]["image"]
    for name, service in SERVICES.items():
        assert service["image"] == own or re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", service["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
    environment = COMPOSE["x-node"]["environment"]
    assert environment["DISTRIBUTED_TOKEN"].startswith("${DISTRIBUTED_TOKEN:?")
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):  # of a store of the user's own
        assert environment[name].startswith(f"${{{name}:-")


def test_what_the_nodes_need_is_in_their_image_and_in_the_checkout() -> None:
    build = COMPOSE["x-node"]["build"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(build["args"]["MORE"].split(",")) <= set(extras)
    assert (FILE.parent / build["context"] / build["dockerfile"]).is_file()
    for volume in COMPOSE["x-node"]["volumes"]:
        source, target, *_ = volume.split(":")
        assert source in COMPOSE["volumes"] or (FILE.parent / source).is_dir()
        assert target.startswith("/home/trainer/")
    constraints = (ROOT / "constraints.txt").read_text()
    assert f"mlflow=={SERVICES['mlflow']['image'].rpartition(':v')[2]}\n" in constraints


def test_the_nodes_differ_in_their_number_only() -> None:
    first, second = (SERVICES[name]["command"] for name in NODES)
    assert [word.replace("--node-rank=0", "--node-rank=1") for word in first] == second
    assert SERVICES["node0"]["depends_on"] == SERVICES["node1"]["depends_on"] == COMPOSE["x-node"]["depends_on"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The directory in which the nodes work, with what the file mounts there."""
    home = tmp_path / "home"
    (home / "runs").mkdir(parents=True)
    shutil.copytree(ROOT / "examples", home / "examples")
    return home


def node_command(name: str, places: Mapping[str, str]) -> list[str]:
    """Return the command of a node with the addresses of this machine, a small model and a few steps."""
    words = [str(word) for word in SERVICES[name]["command"]]
    for old, new in {**places, "--max-steps=200": "--max-steps=4"}.items():
        words = [word.replace(old, new) for word in words]
    return [sys.executable, "-m", "distributed.cli", *words, *SMALL]


def test_the_commands_of_the_nodes_are_accepted(start: Callable[..., Started], home: Path) -> None:
    words = node_command("node0", {"node0": "localhost"})

    done: Finished = start([*words[:4], "--dry-run", *words[4:]], cwd=home).finish(60)

    assert done.returncode == 0 and "on each of 2 nodes" in done.stdout, done.output


# ------------------------------------------------------------------ all of it


class Here:
    """The services of the file as processes of this machine, in the order that `depends_on` demands."""

    def __init__(self, start: Callable[..., Started], home: Path) -> None:
        self._start, self._home = start, home
        ports = {name: free_port() for name in ("mlflow:5000", "store:9000", "tensorboard:6006", "node0")}
        self.tensorboard = f"localhost:{ports['tensorboard:6006']}"
        self.store = f"localhost:{ports['store:9000']}"
        self.mlflow = f"localhost:{ports['mlflow:5000']}"
        self._master_port = ports.pop("node0")
        data = home.parent / "data"
        data.mkdir()
        self.places = {
            **{name: f"localhost:{port}" for name, port in ports.items()},
            **{f"localhost:{name.partition(':')[2]}": f"localhost:{port}" for name, port in ports.items()},
            **{f"--port={name.partition(':')[2]}": f"--port={port}" for name, port in ports.items()},
            "0.0.0.0": "127.0.0.1", "/data": str(data), "node0": "localhost",
        }  # fmt: skip
        environment = {name: str(value) for name, value in COMPOSE["x-node"]["environment"].items()}
        environment |= {"DISTRIBUTED_TOKEN": "a secret for the test", "CUDA_VISIBLE_DEVICES": ""}
        self._env = {
            name: self._here(re.sub(r"\$\{\w+:-([^}]+)\}", r"\1", value)) for name, value in environment.items()
        }

    def _here(self, word: Any) -> str:
        text = str(word)
        for old, new in self.places.items():
            text = text.replace(old, new)
        return text

    def begin(self, name: str) -> Started:
        """Start a service, and wait until its health check succeeds."""
        service = SERVICES[name]
        program, *words = [self._here(word) for word in (*service["entrypoint"], *service["command"])]
        begun = self._start([*_program(program), *words], cwd=self._home, env=self._env)
        if "healthcheck" in service:
            check = [self._here(word) for word in service["healthcheck"]["test"][1:]]
            command = [*_program(check[0]), *check[1:]]
            poll(
                lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0,
                120, lambda: begun.output, lambda: begun.process.poll() is not None,
            )  # fmt: skip
        return begun

    def node(self, name: str) -> Started:
        """Start the command of a node."""
        program, *words = node_command(name, self.places)
        place = words.index("--")
        words[place:place] = [f"--master-port={self._master_port}", "--device=cpu"]
        return self._start([program, *words], cwd=self._home, env=self._env)


def _program(name: str) -> list[str]:
    """Return the words that start a program of the images with the Python of the tests."""
    modules = {"mlflow": "mlflow", "moto_server": "moto.server", "tensorboard": "tensorboard.main"}
    return [sys.executable, "-m", modules[name]] if name in modules else [sys.executable]


@pytest.fixture
def here(start: Callable[..., Started], home: Path) -> Here:
    return Here(start, home)


@pytest.mark.cluster
def test_the_commands_of_the_file_work_together(here: Here, home: Path) -> None:
    here.begin("store")
    assert here.begin("bucket").finish(30).returncode == 0
    here.begin("mlflow")
    begun = [here.node(name) for name in NODES]
    done = [each.finish(150) for each in begun]
    here.begin("tensorboard")

    assert [each.returncode for each in done] == [0, 0], done[0].output + done[1].output
    (result,) = home.glob("runs/*/result.json")
    assert json.loads(result.read_text())["world_size"] == 2
    assert "without a secret" not in done[0].output
    with contextlib.closing(urllib.request.urlopen(f"http://{here.store}/checkpoints?list-type=2")) as answer:
        assert re.search(r"<Key>run/step-\d+/manifest.json</Key>", answer.read().decode())
    shown = _json(f"http://{here.tensorboard}/data/runs")
    assert len(shown) >= 1
    found = _json(
        f"http://{here.mlflow}/api/2.0/mlflow/runs/search", json.dumps({"experiment_ids": ["0", "1"]}).encode()
    )
    assert [run["info"]["status"] for run in found["runs"]] == ["FINISHED"]


def _json(url: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    with contextlib.closing(urllib.request.urlopen(request)) as answer:
        return json.loads(answer.read())
