"""Manifests of a run for the operators Kubeflow Trainer v2 (TrainJob) and KubeRay (RayJob)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from distributed.errors import ConfigError
from distributed.launcher.submit.job import BatchJob
from distributed.launcher.submit.kubernetes_values import amount
from distributed.launcher.submit.manifests import (
    LABEL,
    KubernetesOptions,
    container,
    directory,
    job_spec,
    limits,
    metadata,
    pod_spec,
    words,
)

# Settings of a RayJob's command. The command runs on the head of the Ray cluster and joins this cluster.
OF_RAYJOB: Mapping[str, str] = {"backend": "ray", "address": "auto"}
_TRAINER = {"apiVersion": "trainer.kubeflow.org/v1alpha1"}
# Limits of the pods that do not train. Those of the submitter are KubeRay's own default.
_HEAD = {"cpu": "2", "memory": "8Gi"}
_SUBMITTER = {"cpu": "1", "memory": "1Gi"}
_PLAIN = re.compile(r"[\w.,:/=+@%-]+")  # a word that no shell changes


def trainjob_manifests(job: BatchJob, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return a TrainingRuntime, which has the pods, and a TrainJob that runs it.

    Kubeflow Trainer makes an indexed Job and a headless Service from these. Its plugin for torch gives each pod the variables of
    torchrun (PET_NODE_RANK and others), from which `train` reads its node rank.
    """
    plan = job.plan
    container_of_node = container(job, options, [], words(job, options)) | limits(job, options)
    spec = job_spec(job, options, pod_spec(job, options, [container_of_node]))
    del spec["completions"], spec["parallelism"]  # Kubeflow sets them to numNodes
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": spec,
        },
    }
    runtime = {
        "mlPolicy": {"numNodes": plan.num_nodes, "torch": {}},
        "template": {"spec": {"replicatedJobs": [node]}},
    }
    train = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
        "trainer": {"numNodes": plan.num_nodes, "numProcPerNode": plan.nproc_per_node},
    }
    return [
        {**_TRAINER, "kind": "TrainingRuntime", "metadata": metadata(job, options), "spec": runtime},
        {**_TRAINER, "kind": "TrainJob", "metadata": metadata(job, options), "spec": train},
    ]


def rayjob_manifests(job: BatchJob, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return a RayJob: a Ray cluster with a worker pod for each node, and the command that starts the run.

    The command runs on the head of this cluster, which trains nothing.

    Raises ConfigError if the run does not use Ray or names another cluster, or if a word of the command would be changed on its way
    through Ray's job server.
    """
    given = {name: job.value_of(f"--{name}") for name in OF_RAYJOB}
    if job.plan.backend != "ray" or given["backend"] not in ("", "ray"):
        backend = given["backend"] or job.plan.backend
        raise ConfigError(
            f"--kind rayjob starts a Ray cluster, which only the backend ray uses: drop --backend {backend}"
        )
    if given["address"] not in ("", OF_RAYJOB["address"]):
        raise ConfigError(f"--kind rayjob starts the Ray cluster that the run joins: drop --address {given['address']}")
    own = [word for name, value in OF_RAYJOB.items() if not given[name] for word in (f"--{name}", value)]
    command = words(job, options, own)
    if wrong := [word for word in command if not _PLAIN.fullmatch(word)]:
        raise ConfigError(
            f"{wrong[0]!r} cannot be a word of a RayJob's entrypoint: use letters, digits and .,:/=+@%-_ in it"
        )

    _check_cpus(job, options)

    def template(name: str, resources: dict[str, Any]) -> dict[str, Any]:
        spec = pod_spec(job, options, [container(job, options, [], None, name) | resources])
        return {"metadata": {"labels": {LABEL: job.name}}, "spec": spec}

    nodes = template("ray-worker", limits(job, options))
    head = template("ray-head", {"resources": {"limits": _HEAD}})
    del nodes["spec"]["restartPolicy"], head["spec"]["restartPolicy"]  # KubeRay restarts the nodes of its cluster
    head["spec"]["initContainers"] = [directory(job, options)]
    count = job.plan.num_nodes
    workers = {
        "groupName": "nodes", "replicas": count, "minReplicas": count, "maxReplicas": count, "rayStartParams": {}, "template": nodes,
    }  # fmt: skip
    spec = {
        "entrypoint": " ".join(command),
        "backoffLimit": options.retries,  # each attempt has a new cluster and continues the run
        "shutdownAfterJobFinishes": True,
        "submitterPodTemplate": template("submitter", {"resources": {"limits": _SUBMITTER}}),
        "rayClusterSpec": {
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": head},
            "workerGroupSpecs": [workers],
        },
    }
    return [{"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata(job, options), "spec": spec}]


def _check_cpus(job: BatchJob, options: KubernetesOptions) -> None:
    """Raise ConfigError if a worker pod has fewer CPUs than Ray reserves for its processes."""
    each = job.settings.config.options("ray").cpus_per_worker if job.settings is not None else 1
    wanted = job.plan.nproc_per_node * each
    if options.cpus is not None and math.ceil(amount(options.cpus, "cpus")) < wanted:
        raise ConfigError(
            f"--cpus {options.cpus} is too few: Ray reserves {each:g} for each of the {job.plan.nproc_per_node} processes of a pod: give"
            f" --cpus {math.ceil(wanted)} or more"
        )
