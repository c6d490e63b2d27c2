"""Checks of how a run ends: many runs in a row, a rank that fails or is killed, and settings that are refused before
the start."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from distributed.backends import entry_in_use, make_backend
from distributed.backends.capabilities import NO_SETTINGS
from distributed.config.fields import Rule, rules
from distributed.config.merging import Overrides, merge
from distributed.config.plan import plan_processes
from distributed.config.settings import DistributedConfig, canonical, group_options
from distributed.errors import ConfigError
from distributed.launching.exposure import warnings_of
from distributed.testing.adapter import Adapter
from distributed.testing.running import Finished, Runner, run_python, train


def check_starts(
    adapter: Adapter, world_size: int, directory: Path, times: int, run: Runner = run_python
) -> list[float]:
    """Check that `times` runs in a row exit with 0 and print nothing unexpected. Return the duration of each in
    seconds."""
    config = DistributedConfig(
        **canonical({"backend": adapter.backend, "nproc_per_node": world_size, **adapter.settings})[0]
    )
    # Warnings about open ports of the engine.
    expected = warnings_of(config, plan_processes(config), entry_in_use(config, adapter.backend))
    seconds = []
    for number in range(times):
        done = train(adapter, world_size, "short.py", directory / str(number), [adapter.model], run)
        assert done.returncode == 0, f"start {number + 1} of {times}: exit {done.returncode}\n{done.output[-3000:]}"
        assert "came to its end" in done.output, done.output
        lines = done.output.splitlines()
        assert all(lines.count(line) == 1 for line in expected), (
            f"start {number + 1} of {times}: expected {expected}\n{lines}"
        )
        text = "\n".join(line for line in lines if line not in expected)
        for word in ("terminate called", "Traceback", "Warning", "warning"):
            assert word not in text, f"start {number + 1} of {times}\n{text[-3000:]}"
        seconds.append(done.seconds)
    return seconds


def check_exception(adapter: Adapter, world_size: int, directory: Path, run: Runner = run_python) -> Finished:
    """Check that an exception on one rank ends all ranks with exit code 1, and that its message is the last line."""
    done = train(adapter, world_size, "short.py", directory, [adapter.model, "raise"], run)
    last = done.output.strip().splitlines()[-1]
    assert done.returncode == 1 and last == "ValueError: this rank has had enough", done.output[-3000:]
    assert f"rank {world_size - 1} failed with ValueError" in done.output, done.output[-3000:]
    return done


def check_kill(adapter: Adapter, world_size: int, directory: Path, run: Runner = run_python) -> Finished:
    """Check that a killed rank ends all ranks with exit code 1 if nothing is restarted, and that the output names
    it."""
    killed = dataclasses.replace(adapter, settings={**adapter.settings, "max_restarts": 0})
    done = train(killed, world_size, "short.py", directory, [adapter.model, "kill"], run)
    assert done.returncode == 1, done.output[-3000:]
    assert f"rank {world_size - 1} was killed by signal 9 (SIGKILL)" in done.output, done.output[-3000:]
    return done


def refused_value(name: str) -> Any:
    """Return a value of the setting that is not its default."""
    field, _, wanted = name.partition("=")
    group, _, option = field.rpartition(".")
    rule = rules(group_options(group) if group else DistributedConfig)[option]
    return wanted if wanted else _another(rule)


def _another(rule: Rule) -> Any:
    if rule.choices is not None:
        return next(choice for choice in rule.choices if choice != rule.default)
    if bool in rule.kinds:
        return not rule.default
    if str in rule.kinds:
        return "another"
    if tuple in rule.kinds:
        return "0.8,0.9"
    if dict in rule.kinds:
        return "layer=0.5"
    number = (rule.default or rule.minimum or 1) + 1
    if rule.maximum is not None:
        number = min(number, rule.maximum)
    return float(number) if float in rule.kinds else number


def check_refusals(adapter: Adapter) -> int:
    """Check that each setting in the adapter's table of refusals is refused with its reason. Return their number."""
    refuses = {name: why for name, why in adapter.capabilities.refuses.items() if name not in NO_SETTINGS}
    for name, why in refuses.items():
        merged = merge(Overrides(), _settings(adapter, name))
        text = ""
        try:
            make_backend(merged, plan_processes(merged.config, count_gpus=lambda: 8))
        except ConfigError as error:
            text = str(error)
        assert why in text, (
            f"{adapter}: the error for {name}={refused_value(name)!r} is {text!r}, but its table says {why!r}"
        )
    return len(refuses)


def _settings(adapter: Adapter, name: str) -> dict[str, Any]:
    """Return the refused setting, together with the settings that it depends on."""
    more: dict[str, dict[str, Any]] = {
        "node_rank": {"num_nodes": 3},
        "min_nodes": {"num_nodes": 3},
        "min_nproc_per_node": {"nproc_per_node": 3},
        "gpus_per_node": {"nproc_per_node": None},
    }
    needed = {"nproc_per_node": adapter.world_sizes[0], **more.get(name, {})}
    given, _ = canonical({"backend": adapter.backend, **needed, name.partition("=")[0]: refused_value(name)})
    return given


def check_refused_in_a_second(adapter: Adapter, directory: Path, run: Runner = run_python) -> None:
    """Check that a refused setting on the command line gives exit code 2 and one line, and starts no worker."""
    name = next((name for name in adapter.capabilities.refuses if name not in NO_SETTINGS), None)
    if name is None:
        return
    refused = dataclasses.replace(adapter, settings={name.partition("=")[0]: refused_value(name)})
    done = train(refused, adapter.world_sizes[0], "short.py", directory, [adapter.model], run)
    lines = done.output.strip().splitlines()
    assert done.returncode == 2 and adapter.capabilities.refuses[name] in lines[-1] and len(lines) == 1, done.output
    assert max(done.cpu_s, done.seconds / 10) < 5, f"{adapter}: {done.seconds:.1f} s until {name} was refused"
