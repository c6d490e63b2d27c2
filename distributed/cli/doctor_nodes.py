"""`distributed doctor --num-nodes N`: check the nodes of a job against each other, before the job."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distributed.cli.checks import BAD, INFO, OK, Check
from distributed.config.merging import Overrides
from distributed.config.registry import default_backend
from distributed.launcher.start import launch_request
from distributed.launching.subprocess_launch import start_launcher
from distributed.runs.temporary import temporary_directory

_CLOCK_S = 1.0  # a larger difference shows that a node does not set its clock over the network
_SLOW = 0.5  # report a node whose fastest pair is slower than this fraction of the median of the other pairs
_SETTINGS = {"nproc_per_node": 1, "max_restarts": 0, "verbose": False, "backend": default_backend(2)}


def examine_nodes(settings: Mapping[str, Any]) -> Iterator[Check]:
    """Join the other nodes, measure, and yield the result of every check. Call it on every node with the same settings.

    Args:
        settings: `num_nodes`, `node_rank`, `master_addr`, `master_port` and `start_timeout`, those that were given.

    Raises:
        ConfigError: a setting is wrong.
        ResourceError: this node lacks a library or a port.
    """
    with temporary_directory() as directory:
        file = directory / "found.json"
        script = str(Path(__file__).with_name("node_probe.py"))
        overrides = Overrides(flag={**_SETTINGS, **settings}, script=script, script_args=(str(file),))
        code = start_launcher(launch_request(overrides, str(directory / "run")))
        if code != 0 or not file.exists():
            yield Check("nodes", BAD, "they did not join each other, or a process failed: see the message above")
            return
        found = json.loads(file.read_text())
    yield from _of_each(found["facts"])
    yield from _versions(found["facts"])
    yield from _clocks(found["clocks"], found["facts"])
    yield from _bandwidths(found["pairs"], found["facts"])


def _of_each(facts: list[dict[str, Any]]) -> Iterator[Check]:
    for rank, fact in enumerate(facts):
        gpus = ", ".join(f"{count} x {name}" for name, count in Counter(fact["gpus"]).items()) or "no GPU"
        where = f"{fact['name']} ({fact['address']}), interface {fact['interface']}"
        yield Check(f"node {rank}", OK, f"{where}, {fact['cores']} cores, {gpus}")
    kinds = [tuple(sorted(fact["gpus"])) for fact in facts]
    usual = _usual(kinds)
    for rank, kind in enumerate(kinds):
        if kind != usual:
            yield Check(
                _name(rank, facts),
                BAD,
                f"has {len(kind)} GPUs ({', '.join(set(kind)) or 'none'}), unlike the other nodes",
            )


def _versions(facts: list[dict[str, Any]]) -> Iterator[Check]:
    """Yield a check for each version that is not the one that most nodes have."""
    differing = 0
    for name in facts[0]["versions"]:
        versions = [fact["versions"].get(name, "missing") for fact in facts]
        usual = _usual(versions)
        for rank, each in enumerate(versions):
            if each != usual:
                differing += 1
                yield Check(
                    _name(rank, facts),
                    BAD,
                    f"{name} is {each} here and {usual} on {_most(versions, usual)}: install {usual}",
                )
    if not differing:
        yield Check("versions", OK, "the same on all nodes")


def _clocks(offsets: list[float], facts: list[dict[str, Any]]) -> Iterator[Check]:
    for rank, offset in enumerate(offsets):
        if abs(offset) > _CLOCK_S:
            text = f"the clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that of node 0: set it with NTP"
            yield Check(_name(rank, facts), BAD, text)
    if max(map(abs, offsets)) <= _CLOCK_S:
        yield Check("clocks", OK, f"at most {max(map(abs, offsets)) * 1e3:.1f} ms from that of node 0")


def _bandwidths(pairs: Mapping[str, list[float]], facts: list[dict[str, Any]]) -> Iterator[Check]:
    """Yield the bandwidth of each pair, and a check for each node whose pairs are much slower than the others."""
    for pair, (rate, small) in sorted(pairs.items(), key=lambda item: [int(each) for each in item[0].split("-")]):
        yield Check(f"all-reduce {pair}", INFO, f"{rate / 1e6:.1f} MB/s, {small * 1e3:.2f} ms for 4 bytes")
    if len(facts) < 3:  # with two nodes there is nothing to compare with
        return
    usual = statistics.median(rate for rate, _ in pairs.values())
    for rank in range(len(facts)):
        own = [rate for pair, (rate, _) in pairs.items() if str(rank) in pair.split("-")]
        others = [rate for pair, (rate, _) in pairs.items() if str(rank) not in pair.split("-")]
        if max(own) < _SLOW * statistics.median(others):
            text = f"its pairs reach at most {max(own) / 1e6:.1f} MB/s, the others {statistics.median(others) / 1e6:.1f}: check its link"
            yield Check(_name(rank, facts), BAD, text)
    yield Check("all-reduce", OK, f"median of all pairs: {usual / 1e6:.1f} MB/s")


def _usual(values: list[Any]) -> Any:
    """Return the value that most nodes have. If two are equally frequent, the value of the lowest node counts."""
    return Counter(values).most_common(1)[0][0]


def _most(versions: list[str], usual: str) -> str:
    ranks = [str(rank) for rank, each in enumerate(versions) if each == usual]
    return f"node{'s' * (len(ranks) > 1)} {', '.join(ranks[:8])}{', ...' * (len(ranks) > 8)}"


def _name(rank: int, facts: list[dict[str, Any]]) -> str:
    return f"node {rank} ({facts[rank]['name']})"
