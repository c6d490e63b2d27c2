"""The Dockerfiles are linted, pinned and not root, and what they install resolves. No container engine is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distributed.config.registry import REGISTRY

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
SETS = {file.name.removesuffix(".Dockerfile") for file in FILES}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
HADOLINT = Path(sys.executable).with_name("hadolint")
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


def lint(text):
    command = [str(HADOLINT), "--no-color", "--failure-threshold", "style", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def instructions(file, word):
    """The arguments of each `word`, lines that go on joined."""
    text = file.read_text().replace("\\\n", " ")
    return re.findall(rf"^{word} +(.*)$", text, re.M)


def test_there_is_one_for_each_set_of_engines():
    assert {"torch", "horovod", "tensorflow", "all"} == SETS


@each_file
def test_hadolint_finds_nothing(file):
    done = lint(file.read_text())
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


def test_hadolint_would_find_something():
    done = lint(
        (ROOT / "docker" / "torch.Dockerfile").read_text().replace("slim-bookworm", "latest", 1) + "USER root\n"
    )
    assert done.returncode != 0 and "root" in done.stdout


@each_file
def test_the_base_is_pinned_and_the_user_is_not_root(file):
    assert [
        re.fullmatch(r"PYTHON=\d+\.\d+\.\d+-slim-\w+", value) is not None for value in instructions(file, "ARG")[:1]
    ] == [True]
    assert instructions(file, "FROM") == ["python:${PYTHON} AS build", "python:${PYTHON}"]
    assert instructions(file, "USER") == ["1000"]
    assert "latest" not in file.read_text()
    after_user = file.read_text().partition("\nUSER ")[2]
    assert "RUN" not in after_user and "COPY" not in after_user


@each_file
def test_all_that_is_copied_is_here_and_goes_to_the_engine(file):
    allowed = [line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"]
    for line in instructions(file, "COPY"):
        if line.startswith("--from"):
            continue
        *sources, _ = line.split()
        for source in sources:
            assert (ROOT / source).exists() and source in allowed, source
    for script in re.findall(r"python (scripts/\S+)", file.read_text()):
        assert (ROOT / script).exists()


@each_file
def test_a_container_is_healthy_while_its_runs_can_be_read(file, run_cli, tmp_path):
    (check,) = instructions(file, "HEALTHCHECK")
    word, *arguments = json.loads(check.partition("CMD ")[2])
    assert word == "distributed" and instructions(file, "ENTRYPOINT") == ['["distributed"]']
    if file.name != "torch.Dockerfile":
        return  # the command is the same
    assert run_cli(arguments, cwd=tmp_path).returncode == 0
    (tmp_path / "runs").touch()
    assert run_cli(arguments, cwd=tmp_path).returncode == 2


def install(tmp_path, *arguments, path, **more):
    environment = {**os.environ, "PATH": os.pathsep.join([str(path), os.environ["PATH"]]), "CPU_INDEX": "", **more}
    command = ["sh", "docker/install.sh", *arguments]
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@each_file
@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_each_set_asks_pip_for_extras_that_exist_under_the_constraints(file, variant, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PIP_CONSTRAINT $*"\n')
    python.chmod(0o755)
    (engines,) = re.findall(r'^RUN sh docker/install.sh "\$VARIANT" (\w+)', file.read_text(), re.M)
    assert engines == file.name.removesuffix(".Dockerfile")

    done = install(ROOT, variant, engines, path=tmp_path)

    (extras,) = re.findall(r"^constraints.txt -m pip install \.\[([\w,-]+)\]$", done.stdout, re.M)
    assert set(extras.split(",")) <= set(EXTRAS)
    assert ("tensorflow-cuda" in extras) == (variant == "cuda" and engines in ("tensorflow", "all"))
    assert ("torch" in extras) == (engines != "tensorflow")


def test_further_extras_are_added_to_those_of_a_set(tmp_path):
    (tmp_path / "python").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "python").chmod(0o755)

    done = install(ROOT, "cpu", "torch", path=tmp_path, MORE="tensorboard,mlflow")

    assert done.stdout == "-m pip install .[torch,deepspeed,ray,tensorboard,mlflow]\n"
    for file in FILES:
        assert instructions(file, "ARG").count("MORE=") == 1


@each_file
def test_nothing_is_installed_without_the_constraints(file):
    (run,) = [line for line in instructions(file, "RUN") if "install.sh" in line]
    for command in run.split("&&"):
        assert command.strip().startswith(("sh docker/install.sh ", "PIP_CONSTRAINT=constraints.txt ")), command


def test_the_script_that_the_page_runs_needs_nothing_else():
    (script,) = re.findall(
        r"^docker run .* distributed-torch train --script (\S+)", (ROOT / "docker" / "README.md").read_text(), re.M
    )
    text = (ROOT / script).read_text()
    needed = set(re.findall(r"^(?:from|import) (\w+)", text, re.M)) - sys.stdlib_module_names
    assert "torch" in needed <= {"torch", "distributed"}


def test_what_they_install_resolves(tmp_path):
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE", "_distributed_trainer_guard.py"):
        shutil.copy(ROOT / name, tmp_path)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("distributed", "docker", "examples/projects"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)

    done = install(tmp_path, "cpu", "all", "--dry-run", path=Path(sys.executable).parent)

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^Would install .*distributed[-_]trainer", done.stdout, re.M)


@pytest.fixture(scope="module")
def checking():
    """scripts/check_docker_install.py, which `make docker-check` runs."""
    spec = importlib.util.spec_from_file_location("check", ROOT / "scripts" / "check_docker_install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each_file
def test_the_check_runs_the_files_own_commands_on_what_it_copies(checking, file, tmp_path):
    """With a python that only says how it was called."""
    text, engines = checking.joined(file.read_text()), file.name.removesuffix(".Dockerfile")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$VARIANT $PIP_EXTRA_INDEX_URL $PIP_CONSTRAINT $*"\n')
    python.chmod(0o755)

    checking.copy(text, tmp_path / "src")
    variables = checking.build_variables(text, tmp_path / "venv", "cpu", "https://cpu.example")
    said = checking.run(["sh", "-euc", checking.install_command(text, is_dry=False)], tmp_path / "src", variables)
    dry = checking.run(["sh", "-euc", checking.install_command(text, is_dry=True)], tmp_path / "src", variables)

    assert (tmp_path / "src" / "distributed" / "__init__.py").exists()
    assert re.search(r"^cpu .*https://cpu.example constraints.txt -m pip install \.\[", said, re.M)
    assert ("constraints.txt scripts/build_horovod.py --with mpi" in said) == ("horovod" in checking.BACKENDS[engines])
    assert re.search(r"-m pip install --dry-run \.\[", dry) and "build_horovod" not in dry


def test_the_check_knows_every_set_and_its_backends(checking, capsys):
    assert set(checking.BACKENDS) == SETS and set(checking.BACKENDS["all"]) == set(REGISTRY)
    with pytest.raises(SystemExit) as end:
        checking.main(["jax"])
    assert end.value.code == 2 and "there is no Dockerfile for jax" in capsys.readouterr().err


def test_a_word_that_is_none_is_refused(tmp_path):
    for arguments, text in (
        (("gpu", "all"), "VARIANT=gpu is neither cpu nor cuda"),
        (("cpu", "jax"), "no set of engines 'jax'"),
    ):
        done = install(ROOT, *arguments, path=tmp_path)
        assert done.returncode == 2 and text in done.stderr
