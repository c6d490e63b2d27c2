"""Jobs for Kubernetes in pods: processes with what the manifests give them, and nothing else."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from distributed.cli.__main__ import run
from tests.conftest import Started
from tests.kubectl import FakeKubectl
from tests.machines import Machines
from tests.pods import INDEX_FIELD, Cluster

Objects = list[dict[str, Any]]
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(600)
SCRIPT = """
import os, time
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer
from distributed.callbacks import Callback

class Wait(Callback):
    def on_step_end(self, state, result):
        time.sleep(float(os.environ.get("STEP_S", "0.05")))

torch.manual_seed(0)
data = TensorDataset(torch.randn(320, 4, dtype=torch.float64), torch.randn(320, 1, dtype=torch.float64))
trainer = Trainer(
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)),
    optimizer=lambda parameters: torch.optim.Adam(parameters), loss_fn=torch.nn.functional.mse_loss, dtype="float64",
    epochs=2, global_batch_size=8, callbacks=[Wait()],
)
trainer.fit(data)
if trainer.is_main_process:
    print("weights", b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters()).hex())
"""


@pytest.fixture(scope="module")
def expected(run_cli_once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the script in two processes of one machine."""
    home = tmp_path_factory.mktemp("one")
    (home / "train.py").write_text(SCRIPT)
    done = run_cli_once(
        ["train", "--script", "train.py", "--device", "cpu", "--nproc-per-node", "2"], cwd=home, env={"STEP_S": "0"}
    )
    return str(done.stdout.split("weights ")[1].split()[0])


def kubeflow(objects: Objects) -> Objects:
    """Return what Kubeflow Trainer and JobSet make of a TrainJob, as their sources say: names, sizes and torchrun's variables."""
    secret, runtime, train = objects
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    name, asked, spec = train["metadata"]["name"], train["spec"]["trainer"], node["template"]["spec"]
    spec |= {"completions": asked["numNodes"], "parallelism": asked["numNodes"]}
    given = {
        "PET_NNODES": asked["numNodes"], "PET_NPROC_PER_NODE": asked["numProcPerNode"],
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": 29500,
    }  # fmt: skip
    (container,) = [each for each in spec["template"]["spec"]["containers"] if each["name"] == "node"]
    container["env"] += [{"name": variable, "value": str(value)} for variable, value in given.items()]
    container["env"].append({"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX_FIELD}}})
    labels = spec["template"]["metadata"]["labels"]
    service = {
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": labels, "publishNotReadyAddresses": True},
    }
    return [secret, service, {"kind": "Job", "metadata": {"name": f"{name}-node-0"}, "spec": spec}]


class Submitted:
    """A run of two pods that was submitted."""

    def __init__(self, cluster: Cluster, volume: Path) -> None:
        self.cluster, self.run_dir = cluster, volume / "pods"

    def has_saved(self, step: int) -> bool:
        return (self.run_dir / f"checkpoints/step-{step:08}").exists()

    @property
    def weights(self) -> str:
        return self.cluster.output.split("weights ")[1].split()[0]

    @property
    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in (self.run_dir / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def submit(
    make_machines: Callable[..., Machines],
    start: Callable[..., Started],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Submitted]:
    """Return a function that submits the script to two pods. `most` limits the pods that may ever start."""

    def submit(
        *words: str,
        most: int = 2,
        script: str = SCRIPT,
        operator: Callable[[Objects], Objects] = lambda objects: objects,
        volumes: Sequence[str] = ("--claim", "runs"),
    ) -> Submitted:
        machines = make_machines(most, are_names_loopback=False)
        home, volume, storage = tmp_path / "home", tmp_path / "volume", tmp_path / "storage"
        for directory in (home, volume, storage):
            directory.mkdir()
        storage.chmod(0o777)  # it stands for a bucket, which every pod may reach
        (home / "train.py").write_text(script)
        kubectl = FakeKubectl(tmp_path / "bin")
        monkeypatch.chdir(home)
        monkeypatch.setenv("PATH", str(kubectl.directory), prepend=":")
        flags = [
            "--script",
            "train.py",
            "--num-nodes",
            "2",
            "--nproc-per-node",
            "1",
            "--device",
            "cpu",
            "--run-dir",
            "runs/pods",
        ]
        how = ["--image", "i", *volumes, "--working-dir", "/app", "--shm", "64Mi"]
        assert run(["submit", "kubernetes", *flags, *how, *words]) == 0
        cluster = Cluster(
            operator(kubectl.applied), machines, start, tmp_path / "pods", claims={"runs": volume},
            image={"/app": home, "/storage": storage},
        )  # fmt: skip
        return Submitted(cluster, volume)

    return submit


@pytest.mark.parametrize("end", ["killed", pytest.param("lost with its machine", marks=pytest.mark.cluster)])
def test_a_pod_that_ends_is_replaced_and_the_run_goes_on_bit_for_bit(
    submit: Callable[..., Submitted], expected: str, end: str
) -> None:
    job = submit("--checkpoint-every-n-steps", "5", most=3)
    job.cluster.wait_for(lambda: job.has_saved(5), 60)
    if end == "killed":
        job.cluster.pod(1).kill()
    else:
        job.cluster.lose(1)
    job.cluster.finish(90)

    assert job.weights == expected
    assert [(pod.index, pod.code) for pod in job.cluster.pods] == [(0, 0), (1, 137), (1, 0)]
    assert "finished" in job.events


@pytest.mark.cluster
def test_the_pod_of_node_0_is_replaced_too(submit: Callable[..., Submitted], expected: str) -> None:
    job = submit("--checkpoint-every-n-steps", "5", most=6)
    job.cluster.wait_for(lambda: job.has_saved(5), 60)
    job.cluster.lose(0)
    job.cluster.finish(150)

    assert job.weights == expected
    ends = sorted((pod.index, pod.code) for pod in job.cluster.pods)
    assert ends == [(0, 0), (0, 137), (1, 0), (1, 1)]  # node 1 cannot go on without the launcher of node 0
    assert "resumed from step-" in job.cluster.pod(0).output


@pytest.mark.cluster
def test_without_a_claim_a_new_pod_of_node_0_continues_from_the_storage(
    submit: Callable[..., Submitted], expected: str, tmp_path: Path
) -> None:
    """The credentials come from a Secret of the user."""
    key = {"AWS_SECRET_ACCESS_KEY": base64.b64encode(b"key of the bucket").decode()}
    secret = {"kind": "Secret", "metadata": {"name": "bucket"}, "data": key}
    flags = ["--secret", "bucket", "--checkpoint-dir", "file:///storage", "--checkpoint-every-n-steps", "5"]
    job = submit(
        *flags, volumes=(), most=6, script=f"import os; assert os.environ['AWS_SECRET_ACCESS_KEY'] == 'key of the bucket'\n{SCRIPT}",
        operator=lambda objects: [secret, *objects],
    )  # fmt: skip
    job.cluster.wait_for(lambda: [*(tmp_path / "storage").glob("*/manifest.json")], 60)
    job.cluster.lose(0)
    job.cluster.finish(150)

    assert job.weights == expected
    assert "resumed from step-" in job.cluster.pod(0).output and not [*(tmp_path / "volume").iterdir()]


@pytest.mark.cluster
def test_the_pods_of_a_trainjob_train(submit: Callable[..., Submitted], expected: str) -> None:
    job = submit("--kind", "trainjob", operator=kubeflow)
    job.cluster.finish(90)

    assert job.weights == expected
    assert "2 processes on cpu" in job.cluster.output


@pytest.mark.cluster
def test_an_evicted_pod_saves_and_the_run_goes_on_without_a_failure(
    submit: Callable[..., Submitted], expected: str
) -> None:
    job = submit(most=8)
    job.cluster.wait_for(lambda: "epoch 1" in job.cluster.output, 60)
    job.cluster.evict(1)
    job.cluster.finish(90)

    assert job.weights == expected
    assert sorted((pod.index, pod.code) for pod in job.cluster.pods) == [(0, 0), (0, 143), (1, 0), (1, 143)]
    assert not job.cluster.failures and "preempted" in job.events


@pytest.mark.cluster
def test_a_wrong_setting_ends_the_job_at_once(submit: Callable[..., Submitted]) -> None:
    job = submit(script=SCRIPT.replace("global_batch_size=8", "global_batch_size=0"))
    job.cluster.wait_for(lambda: job.cluster.is_over, 60)

    assert job.cluster.why.endswith("ended with 2") and len(job.cluster.pods) == 2
    assert "global_batch_size=0" in job.cluster.output


@pytest.mark.cluster
def test_a_script_that_fails_is_tried_again_so_often(submit: Callable[..., Submitted]) -> None:
    job = submit("--retries", "1", most=8, script="raise RuntimeError('no luck')")
    job.cluster.wait_for(lambda: job.cluster.is_over, 90)

    assert job.cluster.why.endswith("failed too often")
    assert max(job.cluster.failures.values()) == 2  # the first attempt, and one more
    assert job.cluster.output.count("RuntimeError: no luck") >= 2


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["one-pod-per-process", pytest.param("one-pod-per-node", marks=pytest.mark.full)])
def test_the_examples_run_with_other_sizes(
    make_machines: Callable[..., Machines], start: Callable[..., Started], tmp_path: Path, name: str
) -> None:
    text = (ROOT / f"examples/kubernetes/{name}.yaml").read_text()
    for asked, here in (
        ("completions: 4", "completions: 2"),
        ("parallelism: 4", "parallelism: 2"),
        ('value: "32"', 'value: "4"'),
        ('value: "4" } # pods', 'value: "2" } # pods'),
        ("--gpus-per-node=8", "--nproc-per-node=2"),
        ("--resume", "--device=cpu\n            - --epochs=2\n            - --resume"),
    ):
        text = text.replace(asked, here)
    token = base64.b64encode(b"a secret of the nodes").decode()
    secret = {"kind": "Secret", "metadata": {"name": "digits-token"}, "data": {"token": token}}
    volume = tmp_path / "volume"
    volume.mkdir()
    cluster = Cluster(
        [secret, *yaml.safe_load_all(text)], make_machines(2, are_names_loopback=False), start, tmp_path / "pods",
        claims={"runs": volume}, image={"/app/examples": ROOT / "examples"},
    )  # fmt: skip
    cluster.finish(120)

    processes = 4 if name == "one-pod-per-node" else 2
    assert f"{processes} processes on cpu" in cluster.output
    assert re.search(r"^held-out accuracy 0\.[89]", cluster.output, re.M), cluster.output
    assert "without a secret" not in cluster.output
