"""Print which GPUs the workers see, as one JSON line, on a cluster that only claims to have GPUs.

The workers are placed by Ray Train, and in the placement group of a trial.
"""

import json
import os
import sys
from pathlib import Path

import ray
from ray.util.placement_group import placement_group

from distributed.launching.request import LaunchRequest
from distributed.launching.subprocess_launch import start_launcher
from tests import ray_clusters

SCRIPT = 'import os; print(os.environ["LOCAL_RANK"], os.environ["CUDA_VISIBLE_DEVICES"])'


def seen(name, **options):
    """Return LOCAL_RANK and the GPUs of each worker."""
    request = LaunchRequest(
        name, script="show.py", nproc_per_node=2, device="cuda", preload=(), launcher="distributed.backends._ray.launch",
        launcher_options={"address": ray.get_runtime_context().gcs_address, "cpus": 1.0, **options},
    )  # fmt: skip
    assert start_launcher(request) == 0
    return [Path(name, "logs", f"rank-{rank}.log").read_text().split()[-2:] for rank in (0, 1)]


def main():
    Path("show.py").write_text(SCRIPT)
    ray_clusters.init(sys.argv[1], num_cpus=5, num_gpus=4)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    group = placement_group([{"CPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}])
    ray.get(group.ready())
    print(json.dumps({"trial": seen("trial", placement_group=group.id.hex()), "train": seen("train")}))
    ray.shutdown()


if __name__ == "__main__":
    main()
