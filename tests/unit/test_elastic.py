"""Runs whose number of processes may change: the settings, the split of the global batch, and the decisions of a node."""

from __future__ import annotations

import dataclasses
import io
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed import DistributedConfig
from distributed.config.merging import Overrides, joined, merge, read_config_file
from distributed.config.plan import BatchPlan, plan_batch
from distributed.config.settings import canonical
from distributed.errors import ConfigError
from distributed.launching import agent, elastic
from distributed.launching.agent import ForkAgent
from distributed.launching.elastic import WorkerCount
from distributed.launching.heartbeat import Board
from distributed.launching.node_link import NodesEndedError, Round
from distributed.launching.progress_check import ProgressCheck
from distributed.launching.request import LaunchRequest
from distributed.launching.verdicts import Verdicts
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory
from distributed.runs.processes import REGROUP_SIGNAL
from distributed.runs.summary import write_result


@pytest.mark.parametrize("value", ["2:4", (2, 4), [2, 4]])
@pytest.mark.parametrize(("name", "least"), [("num_nodes", "min_nodes"), ("nproc_per_node", "min_nproc_per_node")])
def test_a_range_sets_the_fewest_and_the_most(name: str, least: str, value: Any) -> None:
    config = DistributedConfig(**{name: value})

    assert (getattr(config, least), getattr(config, name)) == (2, 4)
    assert config.is_elastic and config.given.keys() == {name, least}


def test_rays_name_for_the_number_of_workers_is_read() -> None:
    config = DistributedConfig(backend="ray", num_workers=(1, 8))

    assert (config.min_nproc_per_node, config.nproc_per_node) == (1, 8)
    assert config.notices == ("num_workers is read as nproc_per_node",)
    with pytest.raises(ConfigError, match="because it belongs to the loader"):
        DistributedConfig(backend="ray", num_workers=4)


def test_a_range_of_one_number_and_a_plain_number_are_fixed() -> None:
    assert not DistributedConfig(nproc_per_node="4:4").is_elastic
    assert not DistributedConfig(nproc_per_node=4).is_elastic


def test_a_range_in_a_file_is_no_number_to_the_base_of_60(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("num_nodes: 1:4\nlearning_rate: 1.5\nepochs: 3\n")

    config = merge(read_config_file(file), {}).config

    assert (config.min_nodes, config.num_nodes, config.learning_rate, config.epochs) == (1, 4, 1.5, 3)


@pytest.mark.parametrize(
    "layers",
    [
        ({"nproc_per_node": "1:4"}, {}, {"nproc_per_node": 2}),
        ({}, {"nproc_per_node": (1, 4)}, {"nproc_per_node": 2}),
        ({"nproc_per_node": "1:4"}, {"nproc_per_node": 2}, {}),
    ],
)
def test_a_fixed_number_from_a_stronger_source_replaces_a_range(layers: tuple[dict[str, Any], ...]) -> None:
    file, code, flag = (canonical(layer)[0] for layer in layers)

    merged = merge(Overrides(file=file, flag=flag), code)

    assert (merged.config.min_nproc_per_node, merged.config.nproc_per_node) == (None, 2)
    assert not merged.is_given("min_nproc_per_node")
    assert joined(joined(file, code), flag) == {"nproc_per_node": 2}


def test_a_copy_with_a_fixed_number_has_no_range() -> None:
    copy = dataclasses.replace(DistributedConfig(num_nodes="1:4", epochs=2), num_nodes=2)

    assert not copy.is_elastic and copy.given == {"num_nodes": 2, "epochs": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nproc_per_node": "0:4"}, "nproc_per_node='0:4' is not MIN:MAX with 1 <= MIN <= MAX: write nproc_per_node='1:4'"),
        ({"nproc_per_node": "4:1"}, "nproc_per_node='4:1' is not MIN:MAX with 1 <= MIN <= MAX: write nproc_per_node='1:4'"),
        ({"nproc_per_node": "a:b"}, "nproc_per_node='a:b' is not a whole number"),
        ({"min_nodes": 3, "num_nodes": 2}, "min_nodes=3, but num_nodes=2: set num_nodes='3:MAX'"),
        ({"nproc_per_node": "1:4", "num_gpus": 4}, "num_gpus=4 is a fixed number"),
        ({"nproc_per_node": "1:4", "num_nodes": 2}, "nproc_per_node=1:4 does not work with 2 nodes: set num_nodes='1:2'"),
    ],
)  # fmt: skip
def test_a_wrong_range_names_the_fix(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        DistributedConfig(**settings)
    assert message in str(raised.value)


@pytest.mark.parametrize("total", [1, 7, 8, 24, 100])
@pytest.mark.parametrize("full", [2, 3, 8])
def test_fewer_processes_keep_the_global_batch_and_need_no_larger_micro_batch(total: int, full: int) -> None:
    merged = merge(Overrides(), {"global_batch_size": total, "lr_scaling": "linear"})
    plan = plan_batch(merged, full)
    for size in range(1, full):
        fewer = plan_batch(merged, size, full_size=full)
        assert fewer.global_batch_size == total and fewer.data_parallel_size == size
        assert fewer.batch_size <= plan.batch_size
        assert total <= fewer.batch_size * fewer.gradient_accumulation_steps * size
        assert fewer.lr_ratio == plan.lr_ratio
    assert plan_batch(merged, full, full_size=full) == plan


def test_the_batch_size_of_all_processes_sets_the_global_batch() -> None:
    merged = merge(Overrides(), {"batch_size": 8})
    assert plan_batch(merged, 3, full_size=4) == BatchPlan(6, 2, 3, 32, 8)
    assert plan_batch(merged, 1, full_size=4) == BatchPlan(8, 4, 1, 32, 8)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(elastic.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def count_of(most: int, fewest: int | None) -> WorkerCount:
    return WorkerCount(LaunchRequest("run", nproc_per_node=most, min_nproc_per_node=fewest, elastic_interval_s=10))


def test_lost_workers_are_missing_until_the_interval_is_over(clock: Clock) -> None:
    count = count_of(4, 1)
    assert count.begin() == 4
    assert count.shrink(1) == 3 and count.begin() == 3
    assert count.shrink(3) == 0  # none would be left
    assert not count.may_grow(0, has_saved=True)
    clock.now += 11
    assert count.may_grow(0, has_saved=False)
    assert not count.may_grow(0, has_saved=False)  # the workers have been told
    assert count.begin() == 4
    clock.now += 11
    assert not count.may_grow(0, has_saved=True)


def test_a_worker_that_dies_while_the_workers_save_is_missing(clock: Clock) -> None:
    count = count_of(4, 1)
    count.begin()
    count.shrink(2)
    count.begin()
    clock.now += 11
    assert count.may_grow(0, has_saved=True)
    assert count.shrink(1) == 1 and count.begin() == 1


def test_a_fixed_number_does_not_shrink() -> None:
    count = count_of(4, None)
    assert count.begin() == 4 and count.shrink(1) == 0 and count.begin() == 4


def test_a_new_node_takes_part_after_the_next_save_or_the_interval(clock: Clock) -> None:
    count = count_of(1, None)
    count.begin()
    clock.now += 2
    assert not count.may_grow(1, has_saved=False)
    assert count.may_grow(1, has_saved=True)
    count.begin()
    clock.now += 11
    assert count.may_grow(1, has_saved=False)


class Others:
    """The other nodes of a run, as the agent of node 0 sees them."""

    def __init__(self) -> None:
        self.num_newcomers, self.is_round_wanted, self.is_regroup, self.ended = 0, False, False, None
        self.told: list[tuple[Any, ...]] = []
        self.round = Round(1, [0], [], None)

    def num_nodes_waiting(self) -> int:
        return int(self.is_round_wanted)

    def exchange(self, reports: Any) -> None:
        pass

    def send(self, op: str, **message: Any) -> None:
        pass

    def leave(self, how: str, *, is_regroup: bool) -> None:
        self.told.append(("leave", how, is_regroup))

    def fail(self, cause: str, code: int) -> None:
        self.told.append(("fail", cause, code))

    def finish(self, how: str, code: int, *, waits: bool, is_trained: bool = False) -> None:
        self.told.append(("finish", how, code, waits, is_trained))


class Agent:
    """An agent of a run on 1 to 2 nodes, whose workers and whose other nodes are not real."""

    def __init__(self, directory: Path, channel: socket.socket, **more: Any) -> None:
        request = LaunchRequest(str(directory), num_nodes=2, min_nodes=1, monitor_interval=0.05, max_restarts=1, **more)
        self.run, self.others, self.real = RunDirectory(directory), Others(), object.__new__(ForkAgent)
        display = Display(io.StringIO(), live=False)
        real: Any = self.real
        real._request, real._run, real._channel, real._display = request, self.run, channel, display
        real._count, real._rendezvous_of_nodes = WorkerCount(request), self.others
        real.verdicts = Verdicts(request, self.run, display, real._count)
        others: Any = self.others
        real._progress = ProgressCheck(
            request, self.run, display, Board(1), real.verdicts, others, lambda: None, lambda rank: ("", "here")
        )
        real._is_elastic, real._remaining_restarts, real._nodes = True, 0, [object()]
        real.verdicts.begin({0: 0}, 0)

    def add(self, op: str, **more: Any) -> None:
        self.real.verdicts.add({"op": op, **more})

    def lose_the_connection(self) -> None:
        self.add(
            "event", kind="error", rank=0, type="ConnectionResetError", message="", traceback="", time=time.time(),
            exit_code=1, is_message_enough=False,
        )  # fmt: skip
        self.add("exit", local_rank=0, status=1, time=time.time())

    def look(self) -> str:
        return str(self.real._monitor_workers(Any).state.name)


@pytest.fixture
def sides() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.setblocking(False)
    with ours, other:
        yield ours, other


@pytest.mark.parametrize(
    ("status", "trains", "expected"),
    [
        ("running", True, "the workers save"),
        ("finished", True, "nothing"),  # the workers are in the code after fit
        (None, False, "another round"),  # a script without a Trainer
    ],
)
def test_a_new_node_stops_only_workers_that_train(
    tmp_path: Path,
    sides: tuple[socket.socket, socket.socket],
    clock: Clock,
    status: str | None,
    trains: bool,
    expected: str,
) -> None:
    node = Agent(tmp_path, sides[0], elastic_interval_s=5)
    if status is not None:
        write_result(tmp_path / "result.json", {"status": status})
    if trains:
        node.add("event", kind="trains", rank=0)
    node.others.num_newcomers = 1
    clock.now += 6
    node.real._let_new_ones_take_part()

    assert node.others.is_round_wanted is (expected == "another round")
    try:
        asked = json.loads(sides[1].recv(4096))
    except BlockingIOError:
        asked = None
    assert asked == ({"op": "signal", "signum": int(REGROUP_SIGNAL)} if expected == "the workers save" else None)


def test_without_restarts_left_a_node_goes_on_once_it_is_known_that_another_is_lost(
    tmp_path: Path, sides: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Agent(tmp_path, sides[0])
    node.lose_the_connection()
    waits = iter([None] * 100)  # 5 s, after the 3 s in which a cause elsewhere is named

    def wait(_: float) -> None:
        node.others.is_round_wanted = next(waits, "noticed") == "noticed"

    monkeypatch.setattr(agent.time, "sleep", wait)
    assert node.look() == "HEALTHY" and node.others.is_round_wanted


def test_without_restarts_left_a_lost_connection_ends_the_run_if_no_node_is_lost(
    tmp_path: Path, sides: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "LOST_AFTER_S", 0.2)
    monkeypatch.setattr(agent, "_CAUSE_S", 0.1)
    node = Agent(tmp_path, sides[0])
    node.lose_the_connection()
    assert node.look() == "FAILED"
    node.real.give_up()
    assert node.others.told == [
        ("fail", "rank 0 lost the connection to another rank on node 0 (" + socket.gethostname() + ")", 1)
    ]


def test_the_cause_on_another_node_ends_the_wait(tmp_path: Path, sides: tuple[socket.socket, socket.socket]) -> None:
    node = Agent(tmp_path, sides[0])
    node.others.ended = NodesEndedError("rank 1 failed with ValueError", 1)
    node.lose_the_connection()
    with pytest.raises(NodesEndedError, match="rank 1 failed with ValueError"):
        node.look()


@pytest.mark.parametrize(
    ("interrupted", "told"),
    [
        (REGROUP_SIGNAL, ("leave", "was stopped by SIGTERM", True)),
        (15, ("finish", "was stopped by SIGTERM", 143, False, False)),  # the workers of all nodes agreed on the end
    ],
)
def test_a_node_that_is_told_to_end_says_whether_the_others_go_on(
    tmp_path: Path, sides: tuple[socket.socket, socket.socket], interrupted: int, told: tuple[Any, ...]
) -> None:
    node = Agent(tmp_path, sides[0], node_rank=1)
    node.add("stop", signum=15, is_first=False, interrupts=0, is_starting=False)
    node.add("event", kind="interrupted", rank=0, signum=int(interrupted))
    node.add("exit", local_rank=0, status=1, time=time.time())
    assert node.look() == "FAILED"
    node.real.give_up()
    assert node.others.told == [told]


@pytest.mark.parametrize(("ranks", "has_lost", "left"), [([0, 1], False, 0), ([0, 1], True, 1), ([0], True, 1)])
def test_a_restart_counts_unless_a_node_was_lost(
    tmp_path: Path, sides: tuple[socket.socket, socket.socket], ranks: list[int], has_lost: bool, left: int
) -> None:
    """A newcomer alone gives no restart back."""
    node: Any = Agent(tmp_path, sides[0]).real
    node._of_engine, node._is_restart, node._ranks_before, node._world_size = None, True, [0], 0
    node._names = {}
    about = {"name": "node0", "listens_at": None, "address": None}
    node._rendezvous_of_nodes.round = Round(2, ranks, [about] * len(ranks), ["node0", 1, None], has_lost)
    node._assign_worker_ranks(None, 0, len(ranks), None)
    assert node._remaining_restarts == left


def test_workers_that_save_for_a_regroup_are_not_killed_because_those_of_another_node_were_faster(
    tmp_path: Path, sides: tuple[socket.socket, socket.socket]
) -> None:
    node = Agent(tmp_path, sides[0], timeout_s=0.4)
    node.others.is_regroup = True
    assert node.look() == "HEALTHY" and not node.others.is_round_wanted
    time.sleep(0.5)
    assert node.look() == "HEALTHY" and node.others.is_round_wanted
