"""`distributed backends`: the table is the adapters' own."""

from __future__ import annotations

import json

import pytest

from distributed.backends import capabilities
from distributed.backends.capabilities import (
    NO_SETTINGS,
    SEVERAL,
    Capabilities,
    Condition,
    all_capabilities,
    everywhere,
    field_of,
    table,
)
from distributed.cli.__main__ import run
from distributed.config.registry import REGISTRY
from distributed.config.settings import GROUPS, DistributedConfig


def test_every_backend_has_its_line_and_column(capsys):
    assert run(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in REGISTRY] == list(REGISTRY)
    (head,) = [line for line in lines if line.startswith("setting")]
    assert head.split() == ["setting", *(entry.group for entry in REGISTRY.values())]
    (several,) = [line for line in lines if line.startswith(SEVERAL)]
    words = dict(zip(REGISTRY, several.removeprefix(SEVERAL).split(), strict=True))
    assert words == {name: "no" if entry.single_process else "yes" for name, entry in REGISTRY.items()}


def test_no_setting_is_left_out():
    shown = {field_of(name) for name in table(all_capabilities())} | set(everywhere(all_capabilities()))
    own = {entry.group for entry in REGISTRY.values()}
    fields = set(DistributedConfig.__dataclass_fields__) - set(GROUPS) | {
        "data.presharded",
        "data.shard_streams",
        "data.remove_unused_columns",
    }
    assert own | {"data"} == set(GROUPS)
    assert shown - set(NO_SETTINGS) == fields


@pytest.mark.parametrize("name", list(REGISTRY))
def test_one_backend_is_shown_with_its_options_and_reasons(name, capsys):
    assert run(["backends", name]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    (found,) = [each for each in all_capabilities() if each.backend == name]
    joined = " ".join(said.split())
    assert all(option in said for option in found.options)
    assert all(" ".join(f"{what}: {why}".split()) in joined for what, why in found.refuses.items())
    conditions = [(what, each) for what, several in found.conditions.items() for each in several]
    assert all(f"{what} {each.when}: {each.reason}" in joined for what, each in conditions)


def test_what_a_setting_has_an_effect_with_is_shown(capsys):
    assert run(["backends", "horovod"]) == 0
    said = capsys.readouterr().out
    shown = " ".join(said[said.index("has an effect only with") :].split())
    assert "several processes: communication_backend, horovod.compression, horovod.adasum, horovod.timeline" in shown
    assert "mixed_precision=fp16: scaler_init_scale, scaler_growth_interval" in shown
    assert run(["backends", "ray"]) == 0
    assert "master_addr" not in capsys.readouterr().out.partition("has an effect only with")[2]  # it is refused


def test_json_says_of_every_setting_whether_it_works(capsys):
    assert run(["backends", "--json"]) == 0
    found = {each["backend"]: each for each in json.loads(capsys.readouterr().out)}
    assert set(found) == set(REGISTRY)
    for each in found.values():
        assert set(DistributedConfig.__dataclass_fields__) - set(GROUPS) <= set(each["settings"])
        assert each["settings"]["batch_size"] is True and each["settings"]["address"] is (each["backend"] == "ray")


def test_a_value_that_is_refused_leaves_the_others():
    picky = Capabilities("picky", "picky", "", (), "", {"compile": "no", "mixed_precision=fp16": "use bf16"}, {})
    plain = Capabilities(
        "plain", "plain", "", (), "", {}, {}, {"mixed_precision=fp16": (Condition("on CPUs", "use bf16"),)}
    )
    assert table([picky, plain]) == {
        "mixed_precision=fp16": {"picky": "no", "plain": "if"},
        "compile": {"picky": "no", "plain": "yes"},
    }
    assert picky.conditions_of("mixed_precision=fp16") == plain.conditions_of("mixed_precision=bf16") == ()
    assert picky.accepts("mixed_precision") and picky.accepts("mixed_precision=bf16")
    assert not picky.accepts("mixed_precision=fp16") and not picky.accepts("compile=True")


def test_what_is_missing_is_said_with_its_command(monkeypatch, capsys):
    monkeypatch.setattr(capabilities, "missing_libraries", lambda entry: ("engine",) if entry.name == "fsdp" else ())
    assert run(["backends"]) == 0
    assert "not installed here (engine): run pip install 'distributed-trainer[torch]'" in " ".join(
        capsys.readouterr().out.split()
    )


def test_an_unknown_backend_is_named():
    with pytest.raises(Exception, match="did you mean 'fsdp'"):
        run(["backends", "fdsp"])
