"""Manifests of a run for Kubernetes: an indexed Job with a pod for each node and a headless Service, without any operator.

A pod is node JOB_COMPLETION_INDEX of the run (`launching/environments/pod.py`). The Service gives pod 0 a name that the others
find (`JOB-0.JOB`). A pod that is lost is replaced by one of the same index, for which the other nodes wait `node_timeout`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from distributed.config.settings import DEFAULT_PORT, DistributedConfig
from distributed.errors import ConfigError
from distributed.launcher.submit.job import PREEMPTED, BatchJob
from distributed.launcher.submit.kubernetes_values import FORMS, amount, check_form
from distributed.launching.secret import VARIABLE

LABEL = "distributed-trainer/run"  # on all objects of a run: the name of its job
CONTAINER = "node"  # Kubeflow Trainer wants this name
_LONGEST = 47  # characters of a name; KubeRay allows no more
_SUFFIX = 20  # characters of the time and the id at the end of a run's name
_NAME = re.compile(rf"[a-z]([-a-z0-9]{{0,{_LONGEST - 2}}}[a-z0-9])?")  # a DNS label
# Seconds until a pod on a node that does not answer is replaced; Kubernetes waits five minutes by default.
_LOST_NODE_S = 30
_NODE_TIMEOUT_S = 600  # time for a replacement pod to start; it may have to fetch its image
# Exit codes that every attempt would have: wrong settings, and a command that the image lacks or cannot execute.
_PERMANENT_FAILURES = [2, 126, 127]
# The first attempt begins at step 0, any later one continues from the newest checkpoint. `exec` lets signals reach the run.
_SHELL = 'mkdir -p "$0" && exec "$@"'


@dataclasses.dataclass(frozen=True)
class KubernetesOptions:
    """Options for Kubernetes besides nodes and processes. None leaves the default of the cluster or of the image.

    Attributes:
        image: the image of the pods, which has this package, the script and its libraries.
        kind: "job", "trainjob" (Kubeflow Trainer v2) or "rayjob" (KubeRay).
        namespace: the namespace; None for that of kubectl's context.
        claim: the PersistentVolumeClaim for runs. With several nodes it must be ReadWriteMany. Without one, the files of a run are
            lost with the pod of node 0, except for checkpoints in object storage.
        volume_path: where the claim is mounted.
        working_dir: the directory in the image from which the paths of the script and the config file start.
        cpus, memory: of each pod, such as "8" and "32Gi".
        shm: size of /dev/shm, which data loaders and NCCL use.
        secrets: the names of Secrets whose keys become environment variables, such as credentials of object storage.
        gpu_resource: the name of GPUs in the cluster.
        save_within: seconds that a pod may take to save before it is killed. It must be longer than a save and its upload take.
        user: the number of the user that runs the processes.
        retries: how often one pod is replaced after a failure. The job fails with the next failure. Pods that were evicted or
            saved because of a signal do not count.

    Raises:
        ConfigError: a value is wrong. The message names the flag of `submit kubernetes`.
    """

    image: str
    kind: str = "job"
    namespace: str | None = None
    claim: str | None = None
    volume_path: str = "/runs"
    working_dir: str | None = None
    cpus: str | None = None
    memory: str | None = None
    shm: str = "8Gi"
    secrets: Sequence[str] = ()
    gpu_resource: str = "nvidia.com/gpu"
    save_within: int = 300
    user: int = 1000
    retries: int = 6

    def __post_init__(self) -> None:
        if self.save_within < 1:
            raise ConfigError(f"--save-within {self.save_within} is not a number of seconds above 0")
        if self.user < 1:
            raise ConfigError(f"--user {self.user} is root or no user: give a number above 0")
        if self.retries < 0:
            raise ConfigError(f"--retries {self.retries} is negative: give 0 or more")
        for name in FORMS:
            given = self.secrets if name == "secret" else [getattr(self, name.replace("-", "_"))]
            check_form(name, [value for value in given if value is not None])
        amounts = {
            name: amount(value, name)
            for name in ("cpus", "memory", "shm")
            if (value := getattr(self, name)) is not None
        }
        if amounts.get("memory", math.inf) <= amounts["shm"]:
            raise ConfigError(
                f"--memory {self.memory} must be more than --shm {self.shm}, whose content counts as memory of the pod: give more memory, or"
                " a smaller --shm"
            )
        path = PurePosixPath(self.volume_path)
        if not path.is_absolute() or ".." in path.parts or path in map(PurePosixPath, ("/", "/tmp", "/dev/shm")):
            raise ConfigError(
                f"--volume-path {self.volume_path} cannot be mounted: name a directory of its own, such as /runs"
            )


def job_name(run_name: str) -> str:
    """Return a name in Kubernetes for the run directory `run_name`."""
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}".rstrip("-")
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - _SUFFIX - 1].rstrip('-')}-{name[-_SUFFIX:].lstrip('-')}"


def check_name(name: str) -> None:
    """Raise ConfigError if `name` cannot be the name of a job."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--job-name {name} is not a name in Kubernetes: begin with a lower-case letter, and use lower-case letters, digits and dashes,"
            f" at most {_LONGEST} characters"
        )


def secret_name(job: BatchJob) -> str:
    """Return the name of the Secret with the token that the nodes share."""
    return f"{job.name}-token"


def metadata(job: BatchJob, options: KubernetesOptions, **more: Any) -> dict[str, Any]:
    """Return the metadata of an object of the run."""
    where = {} if options.namespace is None else {"namespace": options.namespace}
    return {"name": job.name, **where, "labels": {LABEL: job.name}, **more}


def plain_manifests(job: BatchJob, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return the Service, if there are several nodes, and the Job. They hold no secret, only the name of one."""
    head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(job, options)}
    several = job.plan.num_nodes > 1
    node = container(job, options, [*size(job), *master(job)], words(job, options)) | limits(job, options)
    pod = pod_spec(job, options, [node])
    own = {"subdomain": job.name} if several else {}
    return [*([_service(job, options)] if several else []), {**head, "spec": job_spec(job, options, {**own, **pod})}]


def _service(job: BatchJob, options: KubernetesOptions) -> dict[str, Any]:
    """Return the headless Service through which the pods find pod 0, also before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, options),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL: job.name},
            "ports": [{"name": "nodes", "port": DEFAULT_PORT}],
        },
    }


def job_spec(job: BatchJob, options: KubernetesOptions, pod: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of an indexed Job with one pod for each node.

    A pod that fails is replaced by one of the same index. If one pod has failed too often, the job ends.
    """
    return {
        "completionMode": "Indexed",
        "completions": job.plan.num_nodes,
        "parallelism": job.plan.num_nodes,
        "backoffLimitPerIndex": options.retries,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",  # only after the lost pod has ended: it may still save
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                # One evicted pod ends the run on all nodes, after a save.
                {"action": "Ignore", "onExitCodes": _codes([PREEMPTED])},
                {"action": "FailJob", "onExitCodes": _codes(_PERMANENT_FAILURES)},
            ],
        },
        "template": {"metadata": {"labels": {LABEL: job.name}}, "spec": pod},
    }


def _codes(values: list[int]) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": values}


def pod_spec(job: BatchJob, options: KubernetesOptions, containers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the specification of a pod: who runs it, how long it may take to end, and its volumes."""
    storage = {"emptyDir": {}} if options.claim is None else {"persistentVolumeClaim": {"claimName": options.claim}}
    seconds = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_NODE_S}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.save_within,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "tolerations": [{"key": f"node.kubernetes.io/{what}", **seconds} for what in ("not-ready", "unreachable")],
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": options.user, "runAsGroup": options.user, "fsGroup": options.user,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": containers,
        "volumes": [
            {"name": "runs", **storage},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
        ],
    }  # fmt: skip


def container(
    job: BatchJob,
    options: KubernetesOptions,
    environ: list[dict[str, Any]],
    command: list[str] | None,
    name: str = CONTAINER,
) -> dict[str, Any]:
    """Return a container that runs `command`, or, if it is None, the command that an operator gives it."""
    # USER: torch asks for the name of the user, and the image may know none with this number.
    own = {"HOME": "/tmp", "TMPDIR": "/tmp", "USER": "train", "PYTHONUNBUFFERED": "1"}
    start = {} if command is None else {"command": ["sh", "-c", _SHELL, run_dir_in_pod(job, options), *command]}
    where = {} if options.working_dir is None else {"workingDir": options.working_dir}
    return {
        "name": name,
        "image": options.image,
        **start,
        **where,
        **({"envFrom": [{"secretRef": {"name": each}} for each in options.secrets]} if options.secrets else {}),
        "env": [*variables(own), *environ, *token(job)],
        **_rights(options),
    }


def limits(job: BatchJob, options: KubernetesOptions) -> dict[str, Any]:
    """Return the resources of a container that trains."""
    gpus = job.plan.nproc_per_node if job.plan.device == "cuda" else None
    asked = {"cpu": options.cpus, "memory": options.memory, options.gpu_resource: gpus}
    return {"resources": {"limits": {name: value for name, value in asked.items() if value is not None}}}


def directory(job: BatchJob, options: KubernetesOptions) -> dict[str, Any]:
    """Return an init container that makes the run directory."""
    made = ["mkdir", "-p", run_dir_in_pod(job, options)]
    resources = {"limits": {"cpu": "100m", "memory": "64Mi"}}
    return {"name": "directory", "image": options.image, "command": made, "resources": resources, **_rights(options)}


def _rights(options: KubernetesOptions) -> dict[str, Any]:
    """Return what a container may do and where it may write."""
    return {
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "runs", "mountPath": options.volume_path},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }  # fmt: skip


def variables(environ: dict[str, str]) -> list[dict[str, Any]]:
    """Return environment variables as a container has them."""
    return [{"name": name, "value": value} for name, value in environ.items()]


def size(job: BatchJob) -> list[dict[str, Any]]:
    """Return the variable that says how many processes train together, if there are several nodes."""
    return variables({"WORLD_SIZE": str(job.plan.world_size)}) if job.plan.num_nodes > 1 else []


def master(job: BatchJob) -> list[dict[str, Any]]:
    """Return the variables with the address of node 0, if there are several nodes."""
    if job.plan.num_nodes == 1:
        return []
    return variables({"MASTER_ADDR": f"{job.name}-0.{job.name}", "MASTER_PORT": str(DEFAULT_PORT)})


def token(job: BatchJob) -> list[dict[str, Any]]:
    """Return the variable with the secret of the nodes, by the name of its Secret."""
    if job.plan.num_nodes == 1:
        return []
    return [{"name": VARIABLE, "valueFrom": {"secretKeyRef": {"name": secret_name(job), "key": "token"}}}]


def run_dir_in_pod(job: BatchJob, options: KubernetesOptions) -> str:
    """Return the run directory as the pods see it."""
    return str(PurePosixPath(options.volume_path) / job.name)


def words(job: BatchJob, options: KubernetesOptions, more: Sequence[str] = ()) -> list[str]:
    """Return the words of the command, as each pod runs it. `more` are flags besides those of the job."""
    several = job.plan.num_nodes > 1 and not job.is_given("node_timeout")
    timeout = ["--set", f"node_timeout={_NODE_TIMEOUT_S}"] if several else []
    timeout += _timeout_of_save(job, options)
    own = ["--", *job.script_args] if job.script_args else []
    start = ["python", "-m", "distributed.cli", "train", *job.words, *more, *timeout]
    return [*start, "--run-dir", run_dir_in_pod(job, options), "--resume", *own]


def _timeout_of_save(job: BatchJob, options: KubernetesOptions) -> list[str]:
    """Return flags that raise `timeout_s`, after which the launcher kills its workers, to at least `save_within`.

    Raises ConfigError if a shorter `timeout_s` was given.
    """
    default = DistributedConfig().timeout_s
    given = job.settings.config.timeout_s if job.settings is not None and job.is_given("timeout_s") else None
    if options.save_within <= max(default, given or 0.0):
        return []
    if given is not None:
        raise ConfigError(
            f"--save-within {options.save_within} has no effect with timeout_s={given:g}, after which the workers are killed: give"
            f" --set timeout_s={options.save_within}, or drop timeout_s"
        )
    return ["--set", f"timeout_s={options.save_within}"]
