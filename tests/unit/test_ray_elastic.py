"""How many workers an elastic run on Ray starts, with a cluster that is made up."""

from __future__ import annotations

import importlib
import pickle
import types
from typing import Any

import pytest

from distributed.backends._ray import placing
from distributed.backends._ray.placing import Placement
from distributed.backends._ray.resources import Workers
from distributed.backends._ray.worker import Restart
from distributed.launching.request import LaunchRequest
from tests.conftest import needs_backend


class MadeUpCluster:
    """Nodes with free CPUs each, some of which others use. A placement group gets what is free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, totals: list[int], used: list[int]) -> None:
        placement_group = importlib.import_module("ray.util.placement_group")
        self.totals, self.free = totals, [total - used for total, used in zip(totals, used, strict=True)]
        self.tried: list[int] = []
        self.groups: list[types.SimpleNamespace] = []
        monkeypatch.setattr(placement_group, "placement_group", self.group)
        monkeypatch.setattr(placement_group, "remove_placement_group", self.remove)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "NodeManagerHostname": f"node{number}", "NodeID": str(number), "Resources": {"CPU": total}}
            for number, total in enumerate(self.totals)
        ]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": float(sum(self.free))}

    def group(self, bundles: list[dict[str, float]], bundle_label_selector: list[dict[str, str]] | None = None) -> Any:
        self.tried.append(len(bundles))
        self.selectors = bundle_label_selector
        places: list[int] | None = []
        for bundle in bundles:
            fits = [number for number, free in enumerate(self.free) if free >= bundle["CPU"]]
            if not fits:
                for number in places:
                    self.free[number] += int(bundle["CPU"])
                places = None
                break
            places.append(fits[0])
            self.free[fits[0]] -= int(bundle["CPU"])
        made = types.SimpleNamespace(places=places, bundle=bundles[0], wait=lambda seconds: places is not None)
        self.groups.append(made)
        return made

    def remove(self, group: Any) -> None:
        self.groups.remove(group)
        for number in group.places or ():
            self.free[number] += int(group.bundle["CPU"])


@pytest.fixture(autouse=True)
def _ray() -> None:
    needs_backend("ray")


def placement(cluster: MadeUpCluster, most: int, cpus: int) -> Placement:
    request = LaunchRequest("run", nproc_per_node=most, min_nproc_per_node=1)
    return Placement(cluster, request, Workers(1, 1, cpus, False), {}, lambda attempt: None)


def test_room_is_what_ray_could_reserve_and_is_free_again_for_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 3 CPUs for each worker, the free 2 + 2 + 3 CPUs of three nodes are room for one more, not for two."""
    cluster = MadeUpCluster(monkeypatch, [4, 4, 4], [0, 0, 0])
    made, seen = placement(cluster, 8, 3), []

    def run(group: Any, bundle_indices: list[int], *, abandons_silent: bool) -> bool:
        seen.append(len(bundle_indices))
        if len(seen) == 1:
            cluster.totals, cluster.free = [4, 4, 4, 8, 5], [*cluster.free, 2, 5]  # others use 6 CPUs of the fourth
            assert [made.room() for _ in range(4)] == [1, 1, 1, 1]
            assert cluster.tried == [3, 3, 1, 2, 1]  # it was tried once for three and for two, and once more for one
        return len(seen) < 2

    monkeypatch.setattr(made, "_run", run)
    assert made.room() == 0
    made.run_as_many_as_fit()
    assert seen == [3, 4] and made.room() == 0 and cluster.groups == []


def test_what_others_use_is_known_after_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = MadeUpCluster(monkeypatch, [8, 8], [7, 6])
    made = placement(cluster, 16, 1)
    monkeypatch.setattr(made, "_run", lambda group, bundle_indices, **_: False)
    made.run_as_many_as_fit()
    assert cluster.tried == [16, 3]


def test_workers_on_a_silent_node_are_not_waited_for_and_the_next_start_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker on node 1, one of three, never ends. The others say that the node does not answer."""
    cluster = MadeUpCluster(monkeypatch, [1, 1, 1], [0, 0, 0])
    made, started = placement(cluster, 3, 1), []

    class Task:
        def options(self, **_: Any) -> Task:
            return self

        def remote(self, config: dict[str, Any], rank: int, world_size: int) -> tuple[int, int]:
            started.append((config["attempt"], rank))
            return config["attempt"], rank

    def wait(running: list[tuple[int, int]]) -> tuple[list[Any], list[Any]]:
        ready = [each for each in running if each != (1, 1)]
        assert ready, "waits for the worker on the silent node"
        return ready[:1], [each for each in running if each != ready[0]]

    def get(ended: tuple[int, int]) -> None:
        if ended[0] == 1:
            raise pickle.loads(pickle.dumps(Restart(f"rank {ended[1]} starts again", {"1": [1]})))

    errors = dict.fromkeys(("WorkerCrashedError", "NodeDiedError", "OutOfMemoryError"), KeyError)
    monkeypatch.setattr(cluster, "exceptions", types.SimpleNamespace(**errors), raising=False)
    for name, function in {"remote": lambda **_: lambda work: Task(), "wait": wait, "get": get}.items():
        monkeypatch.setattr(cluster, name, function, raising=False)
    monkeypatch.setattr(
        importlib.import_module("ray.util.scheduling_strategies"),
        "PlacementGroupSchedulingStrategy",
        lambda *_, **__: None,
    )
    made.run_as_many_as_fit()
    assert started == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]
    assert cluster.tried == [3, 2] and cluster.selectors == [{"ray.io/node-id": "!in(1)"}] * 2


def test_a_node_that_is_silent_a_second_time_is_avoided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, now = placement(MadeUpCluster(monkeypatch, [1, 1], [0, 0]), 2, 1), 1000.0
    monkeypatch.setattr(placing, "time", types.SimpleNamespace(monotonic=lambda: now))
    for seconds, expected in ((0.0, 1), (150.0, 2), (0.0, 1)):  # two nodes are empty, and one of them is silent or was
        now += seconds
        if expected == 1:
            assert list(made._see_silent({"1": [1]})) == [1]
        assert made._most_that_fit() == expected
