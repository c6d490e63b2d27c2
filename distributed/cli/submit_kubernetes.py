"""`distributed submit kubernetes`: its flags, and what a user sees of a job in Kubernetes."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.cli.scheduler import Scheduler
from distributed.errors import ConfigError
from distributed.launcher.submit import kubernetes
from distributed.launcher.submit.job import BatchJob
from distributed.launcher.submit.manifests import KubernetesOptions, job_name
from distributed.launcher.submit.operators import OF_RAYJOB

_ABOUT = """\
Write the manifests of a run for Kubernetes and submit them with kubectl.

The flags of train are accepted, except --token-file, --node-rank, --master-addr
and --master-port. The paths of the script and of --config must be the same here
and in the image. Each pod reads its node rank from its environment. A pod that
is lost is replaced."""


def _add_flags(section: argparse._ArgumentGroup) -> None:
    section.add_argument(
        "--image", metavar="IMAGE", help="image of the pods, with this package and the script (required)"
    )
    section.add_argument(
        "--kind",
        metavar="job|trainjob|rayjob",
        help="what to submit: a plain Job, or a job for Kubeflow Trainer v2 or KubeRay (default: job)",
    )
    section.add_argument("--namespace", metavar="NAME", help="namespace (default: that of kubectl's context)")
    section.add_argument("--job-name", metavar="NAME", help="name of the job (default: that of the run directory)")
    section.add_argument(
        "--claim", metavar="NAME", help="PersistentVolumeClaim for runs; without one, files are lost with pod 0"
    )
    section.add_argument("--volume-path", metavar="DIR", help="where the claim is mounted (default: /runs)")
    section.add_argument(
        "--working-dir", metavar="DIR", help="directory in the image that paths start from (default: the image's)"
    )
    section.add_argument("--cpus", metavar="N", help="CPUs of each pod (default: no limit)")
    section.add_argument("--memory", metavar="SIZE", help="memory of each pod, such as 32Gi (default: no limit)")
    section.add_argument("--shm", metavar="SIZE", help="size of /dev/shm in each pod (default: 8Gi)")
    section.add_argument(
        "--secret",
        metavar="NAME",
        action="append",
        help="a Secret whose keys become variables, such as credentials of object storage; may be repeated",
    )
    section.add_argument("--gpu-resource", metavar="NAME", help="name of GPUs in the cluster (default: nvidia.com/gpu)")
    section.add_argument(
        "--save-within", type=int, metavar="S", help="seconds that a pod has to save before it is killed (default: 300)"
    )
    section.add_argument("--user", type=int, metavar="N", help="user ID of the processes (default: 1000)")
    section.add_argument(
        "--retries",
        type=int,
        metavar="N",
        help="replacements of one pod; after one more failure the job fails (default: 6)",
    )


def _options(values: dict[str, Any]) -> KubernetesOptions:
    given = {name: value for name, value in values.items() if value is not None}
    if "image" not in given:
        raise ConfigError("--image is missing: name the image of the pods, which has this package and the script")
    secrets = given.pop("secret", ())
    return KubernetesOptions(secrets=secrets, **given)


def _settings(options: KubernetesOptions) -> Sequence[Mapping[str, str]]:
    return [OF_RAYJOB if options.kind == "rayjob" else {}]


def _submit(job: BatchJob, options: KubernetesOptions, resume: bool) -> str:
    for text in kubernetes.warnings_about(job, options):
        sys.stderr.write(f"warning: {text}\n")
    return f"{kubernetes.submit(job, options, resume=resume)} was submitted"


def _stop(run_dir: Path) -> str:
    again = "its command with --run-dir RUN --resume".replace("RUN", shlex.quote(str(run_dir)))
    return f"{kubernetes.stop(run_dir)} was told to save and end; to continue the run, repeat {again}"


KUBERNETES = Scheduler(
    "Kubernetes", kubernetes.FILE, _ABOUT, _add_flags, _options, kubernetes.manifest_text, _submit, kubernetes.status, kubernetes.logs,
    _stop, shares_run_dir=False, settings=_settings, name=lambda script, run_dir: job_name(run_dir.name),
)  # fmt: skip
