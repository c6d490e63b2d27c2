"""What an engine refuses is one table in its adapter."""

from __future__ import annotations

import importlib.util

import pytest

from distributed.config.merging import Overrides, merge
from distributed.config.plan import ProcessPlan
from distributed.errors import ConfigError
from distributed.testing import FakeBackend, FakeOptions
from distributed.testing import __main__ as suite


class Picky(FakeBackend):
    refuses = {"compile": "use single", "mixed_precision=fp16": "use bf16"}  # noqa: RUF012 - a constant of the class


def make(device="cpu", **settings):
    return Picky(merge(Overrides(), settings), FakeOptions(), ProcessPlan(1, 1, device, "picky"))


@pytest.mark.parametrize(
    ("device", "settings", "said"),
    [
        ("cpu", {"compile": True}, "compile=True does not work with backend='picky': use single"),
        ("cpu", {"mixed_precision": "fp16"}, "mixed_precision='fp16' does not work with backend='picky': use bf16"),
        ("cuda", {"mixed_precision": True}, "mixed_precision=True does not work with backend='picky': use bf16"),
    ],
)
def test_a_refused_setting_says_what_to_use(device, settings, said):
    with pytest.raises(ConfigError) as caught:
        make(device, **settings)
    assert str(caught.value) == said


def test_defaults_and_other_values_pass():
    make(compile=False, mixed_precision="bf16")
    make(mixed_precision=True)  # bf16 on CPUs


@pytest.mark.parametrize(
    ("adapter", "code", "said"),
    [
        ("fdsp:2", 2, "did you mean 'fsdp'?"),
        ("fsdp:two", 2, "write fsdp:1,2,3"),
        ("fsdp:0", 2, "write fsdp:1,2,3"),
        ("horovod:2", 3, "backend 'horovod' needs horovod"),
    ],
)
def test_the_suite_refuses_what_it_cannot_run_before_it_runs_anything(adapter, code, said, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "horovod" else find(name, *more)
    )
    monkeypatch.setattr(suite, "train_cases", lambda *asked: pytest.fail("it ran"))

    assert suite.main(["single:1", adapter]) == code
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
