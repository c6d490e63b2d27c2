"""Every cell of `distributed backends` against what `train` says of it: `--dry-run`, which starts nothing."""

from __future__ import annotations

import socket

import pytest

from distributed import Callback, ConfigError, callbacks
from distributed.backends import make_backend
from distributed.backends.base import check_callbacks
from distributed.backends.capabilities import SEVERAL, all_capabilities, settings_for_all
from distributed.cli.__main__ import main
from distributed.config.fields import rules
from distributed.config.merging import Overrides, merge
from distributed.config.plan import ProcessPlan
from distributed.config.registry import REGISTRY
from distributed.config.settings import DistributedConfig, canonical, group_options
from distributed.testing.faults import refused_value
from tests.conftest import needs_backend

BACKENDS = {each.backend: each for each in all_capabilities()}
PROCESSES = {name: 1 if entry.single_process else 2 for name, entry in REGISTRY.items()}

# Where another value than the default is not enough: the value, and what it needs beside it.
NEEDS = {
    "num_nodes": (2, {"master_addr": "localhost", "master_port": "PORT"}),
    "node_rank": (1, {"num_nodes": 2, "master_addr": "localhost"}),
    "min_nodes": (2, {"num_nodes": 2, "master_addr": "localhost"}),
    "min_nproc_per_node": (1, {"nproc_per_node": 2}),
    "global_batch_size": (64, {}),
    "loggers": ("csv", {}),
    "device": ("cpu", {}),
    "master_port": ("PORT", {}),
    "address": ("127.0.0.1:1", {}),
}
# (backend, key, when) -> what makes the condition hold, what makes it not hold; in capitals the environment.
CONDITIONS = {
    ("single", "communication_backend", "where the backend is chosen by name"): ("device=cpu", "backend=null"),
    ("single", "communication_backend=nccl", "on CPUs"): ("device=cpu,backend=null", "device=cuda,backend=null"),
    ("pytorch-ddp", "communication_backend=nccl", "on CPUs"): ("device=cpu", "device=cuda"),
    ("fsdp", "communication_backend=nccl", "on CPUs"): ("device=cpu", "device=cuda"),
    ("ray", "communication_backend=nccl", "on CPUs"): ("device=cpu", "device=cuda"),
    ("ray", "num_nodes", "without a cluster to join"): ("num_nodes=2", "num_nodes=1"),
    ("deepspeed", "communication_backend=nccl", "on CPUs"): ("device=cpu", "device=cuda"),
    ("pytorch-ddp", "dtype=float64", "with ddp.comm_hook='powersgd'"): ("ddp.comm_hook=powersgd", "ddp.comm_hook=fp16"),
    ("pytorch-ddp", "mixed_precision=fp16", "with ddp.comm_hook='powersgd' or 'topk'"): ("ddp.comm_hook=topk", "ddp.comm_hook=fp16"),
    ("ray", "dtype=float64", "with ddp.comm_hook='powersgd'"): ("ddp.comm_hook=powersgd", "ddp.comm_hook=fp16"),
    ("ray", "mixed_precision=fp16", "with ddp.comm_hook='powersgd' or 'topk'"): ("ddp.comm_hook=powersgd", "ray.engine=fsdp"),
    ("deepspeed", "mixed_precision=fp16", "on CPUs"): ("device=cpu", "device=cuda"),
    ("deepspeed", "mixed_precision=fp16", "with zero_stage=0"): ("deepspeed.zero_stage=0", "deepspeed.zero_stage=1"),
    ("deepspeed", "mixed_precision=bf16", "with zero_stage=0"): ("deepspeed.zero_stage=0", "deepspeed.zero_stage=3"),
    **{
        ("deepspeed", name, "with native_checkpoint"): ("deepspeed.zero_stage=1,deepspeed.native_checkpoint=true", "deepspeed.zero_stage=1")
        for name in ("checkpoint_trainable_only", "checkpoint_async", "snapshot_every_n_steps")
    },
    ("deepspeed", "optimizer=adafactor", "with zero_stage above 0"): ("deepspeed.zero_stage=1", "deepspeed.zero_stage=0"),
    ("deepspeed", "optimizer=muon", "with zero_stage above 0"): ("deepspeed.zero_stage=3", "deepspeed.zero_stage=0"),
    ("horovod", "communication_backend=mpi", "in processes that mpirun did not start"): ("device=cpu", "OMPI_COMM_WORLD_SIZE=2"),
    ("horovod", "dtype=float64", "with horovod.compression='fp16'"): ("horovod.compression=fp16", "horovod.compression=none"),
    ("horovod", "master_addr", "on several nodes as an IPv6 address"): (
        "num_nodes=2,node_rank=0,master_port=29500,master_addr=::1", "num_nodes=1",
    ),
}  # fmt: skip

ON_TENSORFLOW = "with horovod.keras_backend='tensorflow'"
CONDITIONS |= {
    ("horovod", key, ON_TENSORFLOW): ("horovod.keras_backend=tensorflow", "horovod.keras_backend=torch")
    for key in (
        "mixed_precision=fp16", "activation_checkpointing", "checkpoint_trainable_only", "compile", "scheduler_interval=epoch",
        "scaler_init_scale", "scaler_growth_interval", "data.presharded", "data.shard_streams", "data.remove_unused_columns",
        "optimizer=muon",
    )
}  # fmt: skip
# The same for what callbacks need. The values are settings.
OF_CALLBACKS = {
    **{
        ("deepspeed", need, "with zero_stage above 0"): ({"deepspeed.zero_stage": 1}, {"deepspeed.zero_stage": 0})
        for need in (callbacks.GRADIENTS, callbacks.AVERAGED_WEIGHTS)
    },
    **{
        ("horovod", need, ON_TENSORFLOW): ({"horovod.keras_backend": "tensorflow"}, {"horovod.keras_backend": "torch"})
        for need in callbacks.NEEDS
    },
}


@pytest.fixture
def ask(monkeypatch, capsys, tmp_path):
    """(exit code, what was said) of a dry run with these NAME=VALUE words, on a machine with eight GPUs."""
    (tmp_path / "script.py").touch()
    monkeypatch.setattr("distributed.config.plan.visible_gpus", lambda: 8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def asked(backend, *words):
        needs_backend(backend)
        settings = {name: value for name, _, value in (word.partition("=") for word in words)}
        for name in [name for name in settings if name.isupper()]:
            monkeypatch.setenv(name, settings.pop(name))
        if not settings.keys() & {"num_gpus", "gpus_per_node"}:
            settings.setdefault("nproc_per_node", PROCESSES[backend])
        settings = {"backend": backend, **settings}
        flags = [
            word for name, value in settings.items() for word in ("--set", f"{name}={value}".replace("PORT", str(port)))
        ]
        with pytest.raises(SystemExit) as left:
            main(
                [
                    "train",
                    "--script",
                    str(tmp_path / "script.py"),
                    "--run-dir",
                    str(tmp_path / "run"),
                    "--dry-run",
                    *flags,
                ]
            )
        return left.value.code or 0, " ".join(capsys.readouterr().err.split())

    return asked


def values(name):
    """The values of a setting that are to be tried: each choice but the default, or one other."""
    if name in NEEDS:
        return [NEEDS[name][0]]
    group, _, option = name.rpartition(".")
    rule = rules(group_options(group) if group else DistributedConfig)[option]
    if rule.choices is None:
        return [refused_value(name)]
    return [each for each in rule.choices if each not in (rule.default, True, False)]


CELLS = [(name, value) for name in settings_for_all() if name != "backend" for value in values(name)]


def words_of(name, value):
    text = str(value).lower() if isinstance(value, bool) else value
    more = NEEDS[name][1] if name in NEEDS else {}
    return [f"{name}={text}", *(f"{other}={beside}" for other, beside in more.items())]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_cell_is_what_happens(ask, backend):
    found = BACKENDS[backend]
    several = 2 if PROCESSES[backend] == 2 else 1
    wrong = {}
    for name, value in CELLS:
        if name in ("num_gpus", "gpus_per_node", "nproc_per_node"):
            value = several if found.accepts(name) else 2
        key = f"{name}={value}"
        if found.accepts(key) and found.conditions_of(key):
            continue  # below, with and without
        code, said = ask(backend, *words_of(name, value))
        if found.accepts(key):
            absent = {"address": "127.0.0.1:1", "init_from": "there is no another"}.get(name)
            is_right = code == 0 or (absent is not None and code in (2, 3) and absent in said)
        else:
            is_right = (
                code == 2 and (found.refuses.get(key) or found.refuses[name]) in said and said.startswith("error: ")
            )
        if not is_right:
            wrong[key] = code, said
    assert wrong == {}


@pytest.mark.parametrize("backend", [name for name, entry in REGISTRY.items() if entry.single_process])
def test_one_that_runs_one_process_refuses_several(ask, backend):
    code, said = ask(backend, "nproc_per_node=2")
    assert code == 2 and BACKENDS[backend].refuses[SEVERAL] in said


def test_every_condition_is_tried():
    declared = {
        (found.backend, key, each.when)
        for found in BACKENDS.values()
        for key, several in found.conditions.items()
        for each in several
    }
    assert declared == {*CONDITIONS, *OF_CALLBACKS}


def another(name):
    """A value that is not the default, as a word of the command line."""
    return "gloo" if name == "communication_backend" else str(values(name)[0]).lower()


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda each: "-".join(each[:2]))
def test_a_condition_is_what_refuses(ask, condition):
    backend, key, when = condition
    setting = key if "=" in key else f"{key}={another(key)}"
    holds, does_not = CONDITIONS[condition]
    (reason,) = [each.reason for each in BACKENDS[backend].conditions[key] if each.when == when]

    code, said = ask(backend, setting, *holds.split(","))
    assert code == 2 and f"{when}: {reason}" in said and said.count("error: ") == 1

    code, said = ask(backend, setting, *does_not.split(","))
    assert code == 0, said


class Needs(Callback):
    def __init__(self, need):
        self.needs = (need,)


def said_of(backend, need, settings):
    """Return what is said of a callback with this need, "" if it is accepted."""
    needs_backend(backend)
    given, _ = canonical({"backend": backend, "device": "cpu", **settings})
    made = make_backend(merge(Overrides(), given), ProcessPlan(1, 1, "cpu", backend))
    try:
        check_callbacks(made, [Needs(need)])
    except ConfigError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_need_of_a_callback_is_what_happens(backend):
    found = BACKENDS[backend]
    certain = [need for need in callbacks.NEEDS if not found.conditions_of(need)]  # the others: below, with and without
    for need in certain:
        said, why = said_of(backend, need, {}), found.refuses.get(need)
        assert said == (f"Needs needs {need}, which backend={backend!r} does not have: {why}" if why else "")


@pytest.mark.parametrize("condition", OF_CALLBACKS, ids=lambda each: "-".join(each[:2]))
def test_a_condition_is_what_refuses_a_callback(condition):
    backend, need, when = condition
    holds, does_not = OF_CALLBACKS[condition]
    (reason,) = [each.reason for each in BACKENDS[backend].conditions[need] if each.when == when]
    assert (
        said_of(backend, need, holds) == f"Needs needs {need}, which backend={backend!r} does not have {when}: {reason}"
    )
    assert said_of(backend, need, does_not) == ""
