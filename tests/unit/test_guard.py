"""The console script notices Dask's package of the same name before it imports anything of it."""

from __future__ import annotations

import importlib.metadata
import sys
import types

import pytest

import _distributed_trainer_guard as guard


@pytest.fixture(autouse=True)
def no_dask(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_our_own_package_is_fine():
    assert guard.clash() == ""


def test_dasks_distribution_beside_ours_is_said(monkeypatch, capsys):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2026.1.0")

    with pytest.raises(SystemExit) as end:
        guard.main()

    assert end.value.code == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "Dask's distributed 2026.1.0" in said
    assert "python -m venv" in said


def test_another_package_of_the_name_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", types.ModuleType("distributed"))

    assert "does not belong to distributed-trainer" in guard.clash()
