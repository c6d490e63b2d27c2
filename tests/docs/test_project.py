"""The project's own files agree with each other."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

import distributed
from distributed.config.registry import REGISTRY

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_names() -> set[str]:
    extras = PROJECT["optional-dependencies"].values()
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    return {normal(re.match(r"[\w.-]+", line).group()) for line in lines} - {"distributed-trainer"}


def test_everything_required_is_pinned_exactly():
    pinned = {normal(line.partition("==")[0]) for line in PINS}

    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in PINS)
    assert requirement_names() - pinned == set()
    assert "torch==2.13.0" in PINS


def test_users_are_not_pinned():
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]

    assert [line for line in lines if "==" in line or "<" in line] == []


def test_torch_is_not_needed_to_install():
    assert not any(line.startswith("torch") for line in PROJECT["dependencies"])
    assert any(line.startswith("torch") for line in PROJECT["optional-dependencies"]["torch"])


def test_the_install_command_of_a_backend_brings_all_that_it_needs():
    """torch too, whatever the engine: the launcher is its elastic agent."""
    extras = PROJECT["optional-dependencies"]
    for row in REGISTRY.values():
        assert "torch" in row.requires, row.name
        if extra := re.search(r"\[([\w-]+)\]", row.install):
            lines = [
                *extras[extra.group(1)],
                *(extras["torch"] if "distributed-trainer[torch]" in extras[extra.group(1)] else ()),
            ]
            brought = {re.match(r"[\w-]+", line).group() for line in lines}
            assert set(row.requires) <= brought, (row.name, brought)


def test_changelog_names_this_version():
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M).group(1)

    assert first == distributed.__version__


def test_continuous_integration_skips_no_backend():
    (line,) = re.findall(r"^export REQUIRE_BACKENDS=(\S+)", (ROOT / ".ci" / "run").read_text(), re.M)

    assert line.split(",") == list(REGISTRY)


def test_demo_installs_once_and_again_when_a_pin_moves(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())

    env = {"PATH": os.environ["PATH"]}  # without what an outer make passes on

    def plan() -> str:
        command = ["make", "-n", "demo"]
        return subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout

    train = "train --script examples/train.py --backend pytorch-ddp --nproc-per-node 2"
    fresh = plan()
    assert "pip install" in fresh
    assert train in fresh
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    assert "pip install" not in plan()
    assert train in plan()
    later = (tmp_path / ".venv" / ".installed").stat().st_mtime + 10
    os.utime(tmp_path / "constraints.txt", (later, later))
    assert "pip install" in plan()
