"""Run the workers as Ray tasks in placement groups, without Ray Train: in a trial, on several nodes, or as many as fit."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distributed.backends._ray.resources import Workers, nodes_of
from distributed.errors import ResourceError
from distributed.launching.request import LaunchRequest

_PLACED_S = 10.0  # time for Ray to place workers that should fit
_RESERVED_S = 2.0  # time for Ray to reserve resources that its nodes show as free
# Time in which no worker is placed on a node that did not answer. Ray detects within it that the node is lost.
_SILENT_S = 120.0

logger = logging.getLogger(__name__)
OnLost = Callable[[int], None]  # called with the number of an attempt of which a worker was lost


@dataclasses.dataclass
class _Spare:
    """Hold resources that are reserved for more workers, so that these workers can start at once."""

    most: int = 0  # workers that may still be added; 0 while no attempt runs
    groups: list[Any] = dataclasses.field(default_factory=list)
    reserved: int = 0  # workers for which `groups` have room
    tried: object = None  # the free workers and the silent nodes of the last try


class Placement:
    """The workers of a run as tasks in placement groups, in attempts that Ray's process starts one after the other.

    Args:
        ray: the module, connected to the cluster.
        request: the run.
        workers: the workers; `per_node` is their smallest number.
        worker_config: the argument of each worker, to which the number of the attempt is added.
        on_lost: called if a worker of an attempt was lost, which the launcher may not know if the worker had not connected yet.
    """

    def __init__(
        self, ray: Any, request: LaunchRequest, workers: Workers, worker_config: Mapping[str, Any], on_lost: OnLost
    ) -> None:
        self._ray, self._request, self._workers = ray, request, workers
        self._worker_config, self._on_lost = worker_config, on_lost
        self._num_attempts = 0
        self._silent: dict[str, float] = {}  # node that did not answer -> when it was seen
        self._lock = threading.Lock()
        self._spare = _Spare()

    def run_in_trial(self, group_id: str) -> None:
        """Run the workers in the placement group of a trial, whose first bundle holds the trial itself.

        Ray Train is not used, because it would request another placement group. Raises ResourceError if the workers do not fit.
        """
        from ray.util.placement_group import PlacementGroup

        group = PlacementGroup(self._ray.PlacementGroupID(bytes.fromhex(group_id)))
        self._run_until_done(group, self._bundle_indices(group.bundle_specs))

    def run_on_nodes(self) -> None:
        """Run the workers in a placement group of their own, with a bundle on each of `num_nodes` nodes.

        Ray replaces the bundle of a lost node once another node has room for it. Ray Train is not used, because it cannot place
        so many workers on each node.
        """
        workers = self._workers
        bundle = {name: amount * workers.per_node for name, amount in workers.resources.items()}
        with self._group([bundle] * workers.num_nodes, strategy="STRICT_SPREAD") as group:
            self._run_until_done(group, [rank // workers.per_node for rank in range(self._request.world_size)])

    def run_as_many_as_fit(self) -> None:
        """Run as many workers as fit on the nodes that are alive, in a new placement group for each attempt.

        Workaround (Ray 2.60, no upstream issue known; may go when Ray Train learns of a lost node within seconds and lets workers
        save before it starts more of them): Ray Train is not used. It learns of a lost node up to 20 s later, and kills workers
        without a save before it starts more of them.
        """
        is_wanted, number = True, self._most_that_fit()
        while is_wanted:
            bundles = [self._workers.resources] * number
            with self._group(bundles, **self._elsewhere(number)) as group:
                is_placed = group.wait(_PLACED_S)
                if not is_placed:
                    logger.warning("Ray has not placed %d workers within %g s", number, _PLACED_S)
                else:
                    with self._lock:
                        self._spare = _Spare(self._request.nproc_per_node - number)
                    is_wanted = self._run(group, list(range(number)), abandons_silent=True)
            self._free_spare()
            # If the workers were not placed, other programs use resources, or Ray has not detected yet that a node is lost.
            fewer = max(self._workers.per_node, min(number - 1, self._num_free()))
            number = self._most_that_fit() if is_placed else fewer

    def room(self) -> int:
        """Return how many more workers could be started, and reserve the resources that they need.

        The free resources of all nodes together may be too little on each node. Only workers for which Ray has reserved
        resources are therefore counted. May be called from another thread.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        with self._lock:
            spare = self._spare
            free = min(self._num_free(), spare.most - spare.reserved) if spare.most else 0
            if free > 0 and spare.tried != (free, self._silent_nodes()):
                for number in dict.fromkeys((free, 1)):
                    group = placement_group([self._workers.resources] * number, **self._elsewhere(number))
                    if group.wait(_RESERVED_S):
                        spare.groups.append(group)
                        spare.reserved += number
                        break
                    remove_placement_group(group)
            spare.tried = free, self._silent_nodes()
            return spare.reserved

    # ------------------------------------------------------------------ parts

    @contextlib.contextmanager
    def _group(self, bundles: list[dict[str, float]], **settings: Any) -> Iterator[Any]:
        from ray.util.placement_group import placement_group, remove_placement_group

        group = placement_group(bundles, **settings)
        try:
            yield group
        finally:
            remove_placement_group(group)

    def _most_that_fit(self) -> int:
        """Return how many workers to start: as many as fit on empty nodes, but at least `per_node`."""
        silent = self._silent_nodes()
        fit = sum(self._workers.that_fit_on(node) for node in nodes_of(self._ray.nodes()) if node.id not in silent)
        return max(self._workers.per_node, min(fit, self._request.nproc_per_node))

    def _silent_nodes(self) -> list[str]:
        """Return the Ray ids of the nodes that did not answer recently."""
        return [node for node, seen in self._silent.items() if time.monotonic() - seen < _SILENT_S]

    def _elsewhere(self, number: int) -> dict[str, Any]:
        """Return the arguments of a placement group of `number` bundles that keep the bundles off the silent nodes."""
        silent = self._silent_nodes()
        return {"bundle_label_selector": [{"ray.io/node-id": f"!in({','.join(silent)})"}] * number} if silent else {}

    def _num_free(self) -> int:
        """Return for how many workers the nodes together have free resources."""
        free = self._ray.available_resources()
        return min(int(free.get(name, 0.0) / amount + 1e-9) for name, amount in self._workers.resources.items())

    def _free_spare(self) -> None:
        from ray.util.placement_group import remove_placement_group

        with self._lock:
            for group in self._spare.groups:
                remove_placement_group(group)
            self._spare = _Spare()

    def _run_until_done(self, group: Any, bundle_indices: Sequence[int]) -> None:
        while self._run(group, bundle_indices):
            continue

    def _run(self, group: Any, bundle_indices: Sequence[int], *, abandons_silent: bool = False) -> bool:
        """Run one attempt of the workers, each in the bundle of its rank. Return whether another attempt is wanted.

        With `abandons_silent`, the workers on nodes that do not answer are not waited for when the others have ended: Ray may detect
        only after a minute that such a node is lost. The workers there end by themselves, because their connections break.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from distributed.backends._ray.worker import Restart, work

        ray, cpus = self._ray, self._workers.cpus
        self._num_attempts += 1
        config = {**self._worker_config, "attempt": self._num_attempts}
        task = ray.remote(max_retries=0)(work)
        running = [
            task.options(
                num_cpus=cpus, num_gpus=int(self._workers.is_on_gpu),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle_index),
            ).remote(config, rank, len(bundle_indices))
            for rank, bundle_index in enumerate(bundle_indices)
        ]  # fmt: skip
        is_wanted, ranks, abandoned = False, {each: rank for rank, each in enumerate(running)}, set[int]()
        while not abandoned.issuperset(ranks[each] for each in running):
            ended, running = ray.wait(running)
            for each in ended:
                try:
                    ray.get(each)
                except Restart as error:
                    is_wanted = True
                    if abandons_silent:
                        abandoned.update(self._see_silent(error.silent))
                except (
                    ray.exceptions.WorkerCrashedError,
                    ray.exceptions.NodeDiedError,
                    ray.exceptions.OutOfMemoryError,
                ):
                    is_wanted = True
                    self._on_lost(self._num_attempts)
        return is_wanted

    def _see_silent(self, silent: Mapping[str, Sequence[int]]) -> Iterator[int]:
        """Record the nodes that do not answer, and yield the ranks there."""
        for node, ranks in silent.items():
            self._silent[node] = time.monotonic()
            yield from ranks

    def _bundle_indices(self, bundles: Sequence[Mapping[str, float]]) -> list[int]:
        """Return the bundle of each rank in a trial. Raises ResourceError if the ranks do not fit."""
        wanted = self._workers.resources
        bundle_indices = [
            index
            for index, bundle in enumerate(bundles)
            for _ in range(int(min(bundle.get(name, 0.0) / amount for name, amount in wanted.items())))
            if index > 0
        ]
        processes = self._request.nproc_per_node
        if len(bundle_indices) < processes:
            raise ResourceError(
                f"nproc_per_node={processes} is more than the {len(bundle_indices)} that fit into the trial's placement group beside the"
                f" trial: give it tune.PlacementGroupFactory([{{'CPU': 1}}] + [{wanted}] * {processes})"
            )
        return bundle_indices[:processes]
