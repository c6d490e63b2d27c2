"""Workers of a cluster that is described by TensorFlow's variable TF_CONFIG."""

from __future__ import annotations

import dataclasses
import json
import re

from distributed.launching.environments.base import Surroundings, Worker, WorkerEnvironment, derived_port, number


@dataclasses.dataclass(frozen=True)
class TFCluster:
    """The addresses of the workers in TF_CONFIG (the chief comes first, if there is one), and the number of this process."""

    addresses: tuple[str, ...]
    rank: int


def worker(at: Surroundings) -> Worker:
    """Return the rank of this process among the workers of TF_CONFIG.

    Return None if TF_CONFIG names only one worker or is malformed. The TensorFlow backend refuses a malformed one.
    """
    text = at.environ.get("TF_CONFIG", "")
    cluster = read_tf_config(text) if text else None
    if not isinstance(cluster, TFCluster) or len(cluster.addresses) < 2:
        return None
    hosts = [address.rpartition(":")[0].strip("[]") for address in cluster.addresses]
    here = [rank for rank, host in enumerate(hosts) if host == hosts[cluster.rank]]
    port = number(at.environ, "MASTER_PORT", derived_port(",".join(cluster.addresses)))
    return WorkerEnvironment(
        cluster.rank, here.index(cluster.rank), len(hosts), len(here), list(dict.fromkeys(hosts)).index(hosts[cluster.rank]),
        hosts[0], port, 0, "TF_CONFIG",
    )  # fmt: skip


def read_tf_config(text: str) -> TFCluster | str:
    """Return the cluster that `text`, the value of TF_CONFIG, describes, or a sentence that says what is wrong with it."""
    try:
        content = json.loads(text)
        cluster, task = content.get("cluster", {}), content.get("task", {})
        kinds = {kind: list(cluster[kind]) for kind in cluster}
        kind, index = str(task.get("type", "worker")), int(task.get("index", 0))
    except (ValueError, TypeError, AttributeError):
        return (
            'it is not of the form {"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": 0}}'
        )
    if other := kinds.keys() - {"chief", "worker"}:
        return f"its cluster has tasks of the type {min(other)!r}, and only 'worker' and 'chief' train here"
    addresses = [*kinds.get("chief", []), *kinds.get("worker", [])]
    if not all(isinstance(address, str) and re.fullmatch(r"\S+:\d+", address) for address in addresses):
        return "an address in its cluster is not of the form 'HOST:PORT'"
    if len(set(addresses)) < len(addresses):
        return "its cluster names an address twice"
    if not addresses:
        return TFCluster((), 0)
    if len(addresses) > 1 and not {"type", "index"} & set(task):
        return "it has no task, which names the worker that this process is"
    if not 0 <= index < len(kinds.get(kind, [])):
        return f"its task is {kind} {index}, which its cluster does not have"
    return TFCluster(tuple(addresses), index + (len(kinds.get("chief", [])) if kind == "worker" else 0))
