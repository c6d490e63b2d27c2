"""`distributed submit kubernetes`: the manifests, and what kubectl is asked. `test_pods.py` runs the manifests."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from distributed.backends._ray import starting
from distributed.cli.__main__ import run
from distributed.errors import ConfigError, DistributedError, ResourceError
from distributed.launcher.submit import kubernetes
from distributed.launcher.submit.manifests import job_name
from distributed.launching.environments.base import NodeEnvironment
from distributed.launching.environments.registry import node_environment
from tests.conftest import needs_backend
from tests.crds import definitions, errors_of
from tests.kubectl import FakeKubectl

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("1.29", "1.31", "1.33", "1.35", "1.37")  # the oldest with all fields, to the newest in the package
NODES = ("--num-nodes", "2", "--gpus-per-node", "8")
SUBMIT = ("submit", "kubernetes", "--script", "train.py", "--image", "registry/train:1", "--claim", "runs")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.delenv("DISTRIBUTED_TOKEN", raising=False)
    (home / "train.py").touch()
    return home


@pytest.fixture
def kubectl(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    fake = FakeKubectl(home.parent / "bin")
    monkeypatch.setenv("PATH", str(fake.directory), prepend=":")
    return fake


def rendered(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert run([*SUBMIT, "--dry-run", "--run-dir", "runs/Digits_1", *words]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def pod(document: dict[str, Any]) -> dict[str, Any]:
    template = document["template"] if "rayStartParams" in document else document["spec"]["template"]
    found: dict[str, Any] = template["spec"]
    return found


def container(document: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod(document)["containers"]
    return found


def test_two_nodes_are_an_indexed_job_with_a_service(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service, job = rendered(
        capsys, *NODES, "--namespace", "ml", "--memory", "64Gi", "--epochs", "3", "--", "--hidden size", "64"
    )

    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert {each["metadata"]["namespace"] for each in (service, job)} == {"ml"}
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    spec = job["spec"]
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert pod(job)["subdomain"] == service["metadata"]["name"] == "digits-1"
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert container(job)["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 8}
    assert container(job)["command"] == [
        "sh", "-c", 'mkdir -p "$0" && exec "$@"', "/runs/digits-1", "python", "-m", "distributed.cli", "train", "--script", "train.py",
        "--num-nodes", "2", "--gpus-per-node", "8", "--epochs", "3", "--set", "node_timeout=600", "--run-dir", "/runs/digits-1",
        "--resume", "--", "--hidden size", "64",
    ]  # fmt: skip
    assert list(home.iterdir()) == [home / "train.py"]  # a dry run writes nothing


def test_each_pod_reads_its_place_from_the_rendered_variables(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, job = rendered(capsys, *NODES)

    environ = {each["name"]: each["value"] for each in container(job)["env"] if "value" in each}
    for index in (0, 1):
        place = node_environment({**environ, "JOB_COMPLETION_INDEX": str(index)}, nproc_per_node=8)
        assert place == NodeEnvironment(2, index, "digits-1-0.digits-1", 29500, None)


def test_a_pod_has_no_rights_and_writes_only_to_its_volumes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, job = rendered(
        capsys, *NODES, "--shm", "2Gi", "--user", "1234", "--save-within", "900", "--volume-path", "/mnt/runs", "--gpu-resource", "amd.com/gpu"
    )  # fmt: skip

    spec = pod(job)
    assert spec["terminationGracePeriodSeconds"] == 900
    assert spec["automountServiceAccountToken"] is False
    assert (
        spec["securityContext"].items()
        >= {"runAsNonRoot": True, "runAsUser": 1234, "runAsGroup": 1234, "fsGroup": 1234}.items()
    )
    assert container(job)["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    mounts = {each["mountPath"]: each["name"] for each in container(job)["volumeMounts"]}
    volumes = {each["name"]: {k: v for k, v in each.items() if k != "name"} for each in spec["volumes"]}
    assert {path: volumes[name] for path, name in mounts.items()} == {
        "/mnt/runs": {"persistentVolumeClaim": {"claimName": "runs"}},
        "/tmp": {"emptyDir": {}},
        "/dev/shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}},
    }
    environ = {each["name"]: each.get("value") for each in container(job)["env"]}
    assert environ["HOME"] == environ["TMPDIR"] == "/tmp"
    assert container(job)["command"][3] == "/mnt/runs/digits-1" and container(job)["resources"]["limits"] == {
        "amd.com/gpu": 8
    }


def test_a_lost_pod_is_replaced_and_a_wrong_setting_ends_the_job(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, job = rendered(capsys, *NODES, "--retries", "2")

    spec = job["spec"]
    assert pod(job)["restartPolicy"] == "Never"  # only then do the rules for exit codes count
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"], spec["podReplacementPolicy"]) == (2, 0, "Failed")
    evicted, saved, hopeless = spec["podFailurePolicy"]["rules"]
    assert evicted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert saved == {
        "action": "Ignore",
        "onExitCodes": {"containerName": container(job)["name"], "operator": "In", "values": [143]},
    }
    assert hopeless["action"] == "FailJob" and ConfigError.exit_code in hopeless["onExitCodes"]["values"]
    assert not {1, ResourceError.exit_code} & set(hopeless["onExitCodes"]["values"])  # the next attempt may succeed


def test_one_node_needs_no_service_and_no_secret(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = rendered(capsys, "--device", "cpu", "--nproc-per-node", "4")

    assert job["spec"]["completions"] == 1 and "subdomain" not in pod(job)
    assert "nvidia.com/gpu" not in container(job)["resources"]["limits"]
    assert {each["name"] for each in container(job)["env"]} == {"HOME", "TMPDIR", "USER", "PYTHONUNBUFFERED"}
    assert not any("node_timeout" in word for word in container(job)["command"])


def test_a_given_node_timeout_is_kept(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "train.yaml").write_text("node_timeout: 50\n")
    *_, job = rendered(capsys, *NODES, "--config", "train.yaml")

    assert not any("node_timeout" in word for word in container(job)["command"])


def test_secrets_become_variables(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *_, job = rendered(capsys, *NODES, "--secret", "bucket", "--secret", "hub")

    assert container(job)["envFrom"] == [{"secretRef": {"name": "bucket"}}, {"secretRef": {"name": "hub"}}]


def test_without_a_claim_the_file_says_what_is_lost(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SUBMIT[:-2], "--dry-run"]) == 0

    text = capsys.readouterr().out
    assert "\n# There is no --claim: the files of the run are lost with the pod of node 0.\n" in text
    assert run([*SUBMIT[:-2], "--dry-run", "--checkpoint-dir", "s3://bucket/mine"]) == 0
    other = capsys.readouterr().out
    assert (
        "\n# There is no --claim: the run continues from its checkpoints in s3://bucket/mine, but its other files"
        in other
    )
    assert "the files of the run are lost" not in other
    assert {"name": "runs", "emptyDir": {}} in yaml.safe_load(text)["spec"]["template"]["spec"]["volumes"]


def test_what_looks_like_a_number_is_quoted(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Readers of YAML differ in what they take for a number, and the API takes no number for a string."""
    words = ["1e-4", "08", "0o17", ".5", "+.5e3", "-1.5", "1_0", "190:20", "y", "n"]
    assert run([*SUBMIT, "--dry-run", "--", *words, "plain", "--rate"]) == 0

    text = capsys.readouterr().out
    assert all(f"- '{word}'\n" in text for word in words), text
    assert "- plain\n" in text and "- --rate\n" in text
    assert container(yaml.safe_load(text))["command"][-len(words) - 2 :] == [*words, "plain", "--rate"]


def test_the_workers_get_the_time_that_their_pod_gets(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def timeout(*words: str) -> list[str]:
        *_, job = rendered(capsys, *NODES, *words)
        return [word for word in container(job)["command"] if word.startswith("timeout_s")]

    assert timeout() == timeout("--save-within", "60") == []
    assert timeout("--save-within", "900") == ["timeout_s=900"]
    assert timeout("--set", "timeout_s=1000", "--save-within", "900") == ["timeout_s=1000"]
    assert timeout("--set", "timeout_s=60") == ["timeout_s=60"]
    with pytest.raises(
        ConfigError, match=r"^--save-within 900 has no effect with timeout_s=600, .*--set timeout_s=900"
    ):
        rendered(capsys, *NODES, "--set", "timeout_s=600", "--save-within", "900")


def strict(document: dict[str, Any], version: str) -> None:
    """Validate an object against the API of a version of Kubernetes, in which no unknown field is allowed."""
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    "words",
    [
        NODES,
        ("--device", "cpu", "--nproc-per-node", "2"),
        (*NODES, "--namespace", "ml", "--cpus", "500m", "--memory", "64Gi", "--working-dir", "/app", "--gpu-resource", "amd.com/gpu"),
        (*NODES, "--secret", "bucket", "--secret", "hub"),
    ],
)  # fmt: skip
def test_the_manifests_are_valid_in_every_version(
    home: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    for document in rendered(capsys, *words):
        for version in VERSIONS:
            strict(document, version)


@pytest.mark.parametrize("file", sorted((ROOT / "examples/kubernetes").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_examples_are_valid_in_every_version(file: Path) -> None:
    documents = list(yaml.safe_load_all(file.read_text()))
    assert [each["kind"] for each in documents] == ["Service", "Job"]
    for document in documents:
        for version in VERSIONS:
            strict(document, version)


def test_the_validation_finds_a_misspelt_field(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *_, job = rendered(capsys, *NODES)
    container(job)["comand"] = container(job).pop("command")

    with pytest.raises(kubernetes_validate.ValidationError, match="'comand' was unexpected"):
        strict(job, VERSIONS[-1])


@pytest.mark.parametrize(
    ("run_name", "name"),
    [
        ("train-20260101-120000-ab12", "train-20260101-120000-ab12"),
        ("My Run_2", "my-run-2"),
        ("2nd", "run-2nd"),
        ("...", "run"),
        (
            "a-very-long-name-of-a-training-script-20260101-120000-ab12",
            "a-very-long-name-of-a-trai-20260101-120000-ab12",
        ),
    ],
)
def test_a_run_directory_gives_a_name(run_name: str, name: str) -> None:
    assert job_name(run_name) == name


# kubectl


def test_the_secret_goes_to_standard_input_and_nowhere_else(
    home: Path, kubectl: FakeKubectl, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([*SUBMIT, *NODES, "--namespace", "ml", "--run-dir", "runs/a"]) == 0

    secret, service, job = kubectl.applied
    token = base64.b64decode(secret["data"]["token"]).decode()
    assert len(token) == 64 and secret["metadata"] | {"labels": {}} == {
        "name": "a-token",
        "namespace": "ml",
        "labels": {},
    }
    assert [service, job] == list(yaml.safe_load_all((home / "runs/a/job/job.yaml").read_text()))
    (reference,) = [each for each in container(job)["env"] if each["name"] == "DISTRIBUTED_TOKEN"]
    assert reference["valueFrom"] == {"secretKeyRef": {"name": "a-token", "key": "token"}}
    shown = capfd.readouterr()
    texts = [path.read_text() for path in home.rglob("*") if path.is_file()] + [
        shown.out,
        shown.err,
        str(kubectl.calls),
    ]
    assert not any(token in text or secret["data"]["token"] in text for text in texts)
    assert shown.out == (
        "job a was submitted\nrun directory: runs/a\nto see its state: distributed submit status runs/a\n"
    )


def test_the_secret_of_the_user_is_used(home: Path, kubectl: FakeKubectl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTED_TOKEN", "a secret that somebody chose")
    assert run([*SUBMIT, *NODES]) == 0

    assert base64.b64decode(kubectl.applied[0]["data"]["token"]) == b"a secret that somebody chose"


def test_the_objects_are_applied_in_order(home: Path, kubectl: FakeKubectl) -> None:
    assert run([*SUBMIT, *NODES, "--run-dir", "runs/a"]) == 0

    assert kubectl.calls == [
        ["get", "job", "a", "--ignore-not-found", "--output=name"],
        ["get", "pods", "--selector", "distributed-trainer/run=a", "--output=name"],
        ["apply", "--server-side", "--force-conflicts", "-f", "-"],
        ["apply", "-f", "runs/a/job/job.yaml"],
    ]


def test_a_job_that_is_there_is_not_touched_unless_it_is_continued(home: Path, kubectl: FakeKubectl) -> None:
    kubectl.answer("get", "job.batch/a\n")
    with pytest.raises(ConfigError, match=r"^job\.batch/a is in the cluster already: choose another name"):
        run([*SUBMIT, *NODES, "--run-dir", "runs/a"])
    assert len(kubectl.calls) == 1 and not (home / "runs/a").exists()

    assert run([*SUBMIT, *NODES, "--run-dir", "runs/a", "--resume", "--save-within", "60"]) == 0
    assert [words[0] for words in kubectl.calls[1:]] == ["get", "delete", "get", "wait", "apply", "apply"]
    assert kubectl.calls[2] == ["delete", "job.batch/a", "--cascade=foreground", "--timeout=120s"]


def test_a_run_that_was_stopped_is_continued_after_its_pods_have_ended(home: Path, kubectl: FakeKubectl) -> None:
    """The job has gone when `stop` returns, but its pods still save."""
    resume = [*SUBMIT, *NODES, "--run-dir", "runs/a", "--namespace", "ml", "--resume"]
    own = ["--selector", "distributed-trainer/run=a"]
    kubectl.answer("get", "", then="pod/a-0-x1\npod/a-1-x2\n")
    assert run(resume) == 0
    _, pods, wait, *applied = kubectl.calls
    assert pods == ["--namespace", "ml", "get", "pods", *own, "--output=name"]
    assert wait == ["--namespace", "ml", "wait", "--for=delete", "pods", *own, "--timeout=360s"]
    assert ["apply" in words for words in applied] == [True, True]

    kubectl.answer("get", "", then="pod/a-0-x1\n")
    kubectl.answer("wait", err="error: no matching resources found\n", code=1)
    assert run(resume) == 0
    kubectl.answer("get", "", then="pod/a-0-x1\n")
    kubectl.answer("wait", err="error: timed out waiting for the condition on pods/a-0-x1\n", code=1)
    submitted = len(kubectl.applied)
    with pytest.raises(ResourceError, match=r"^kubectl wait failed: error: timed out waiting"):
        run(resume)
    assert len(kubectl.applied) == submitted


def test_the_manifests_of_a_run_are_not_replaced_by_mistake(home: Path, kubectl: FakeKubectl) -> None:
    file = home / "runs/a/job/job.yaml"
    assert run([*SUBMIT, *NODES, "--run-dir", "runs/a"]) == 0
    before, calls = file.read_text(), len(kubectl.calls)
    with pytest.raises(ConfigError, match=r"^'runs/a' has a job already .*: add --resume to submit it again"):
        run([*SUBMIT, *NODES, "--run-dir", "runs/a", "--job-name", "other"])
    assert file.read_text() == before and len(kubectl.calls) == calls
    assert run([*SUBMIT, *NODES, "--run-dir", "runs/a", "--retries", "3", "--resume"]) == 0
    assert file.read_text() != before


def test_a_run_is_followed_and_stopped_in_its_namespace(
    home: Path, kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SUBMIT, *NODES, "--namespace", "ml", "--run-dir", "runs/a"]) == 0
    submitted = len(kubectl.calls)
    kubectl.answer("get", "NAME    STATUS    COMPLETIONS\na       Running   0/2\n")
    kubectl.answer("logs", "[pod/a-0-x1/node] step 1\n[pod/a-1-x2/node] step 1\n")
    capsys.readouterr()

    assert run(["submit", "status", "runs/a"]) == 0
    assert capsys.readouterr().out == "NAME    STATUS    COMPLETIONS\na       Running   0/2\n"
    assert run(["submit", "logs", "runs/a"]) == 0
    assert capsys.readouterr().out == "[pod/a-0-x1/node] step 1\n[pod/a-1-x2/node] step 1\n"
    kubectl.answer("logs", "")
    assert run(["submit", "logs", "runs/a"]) == 0
    assert capsys.readouterr().out.startswith(
        "no output: a has no pods, or they have written nothing yet; see 'distributed "
    )
    assert run(["submit", "stop", "runs/a"]) == 0
    assert capsys.readouterr().out == (
        "job a was told to save and end; to continue the run, repeat its command with --run-dir runs/a --resume\n"
    )

    label = ["--selector", "distributed-trainer/run=a"]
    ends = [["delete", each, "--ignore-not-found", "--wait=false"] for each in ("job/a", "service/a", "secret/a-token")]
    assert kubectl.calls[submitted:] == [
        ["--namespace", "ml", *words]
        for words in (
            ["get", "job,pods", *label],
            *[["logs", *label, "--prefix", "--tail=-1", "--max-log-requests=1000", "--ignore-errors"]] * 2,
            *ends,
        )
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [("a: [", "it is not YAML"), ("a", "it is not an object"), ("kind: Job\nmetadata: {name: 1}", "it has name=1, which is not a text"),
     ("kind: Pod\nmetadata: {name: a}", "it does not end with a job, trainjob, rayjob that has a name")],
)  # fmt: skip
def test_a_file_of_a_job_that_cannot_be_read_is_one_line(home: Path, kubectl: FakeKubectl, text: str, why: str) -> None:
    (home / "run" / "job").mkdir(parents=True)
    (home / "run" / "job" / kubernetes.FILE).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"cannot be read ({why}): submit the run again with --resume")):
        run(["submit", "status", "run"])
    assert not kubectl.calls


KLOG = 'E1123 17:03:58.633965    1391 memcache.go:265] "Unhandled Error" err="couldn\'t get current server API group list"\n'


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("get", "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host or port?"),
        ("get", "error: You must be logged in to the server (Unauthorized)"),
        ("get", 'Error from server (Forbidden): jobs.batch "a" is forbidden: User "me" cannot get resource "jobs"'),
        (
            "apply",
            'Error from server (Forbidden): error when creating "STDIN": pods "a" is forbidden: exceeded quota: gpus',
        ),
    ],
)
def test_a_refusal_is_one_line_with_the_words_of_the_server(
    home: Path, kubectl: FakeKubectl, verb: str, words: str
) -> None:
    kubectl.answer(verb, err=KLOG + words + "\n", code=1)

    with pytest.raises(ResourceError) as caught:
        run([*SUBMIT, *NODES, "--run-dir", "runs/a"])
    assert str(caught.value) == (
        f"kubectl {verb} failed: {words}; the manifests are written, their first lines say how to submit them: runs/a/job/job.yaml"
    )
    text = (home / "runs/a/job/job.yaml").read_text()
    assert "kubectl apply -f FILE" in text and "kubectl create secret generic a-token --from-file=token=FILE" in text


def test_a_server_that_does_not_answer_is_not_waited_for_for_ever(
    home: Path, kubectl: FakeKubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "_ANSWER_S", 0.5)
    kubectl.answer("get", seconds=30)

    with pytest.raises(
        ResourceError, match=r"^kubectl get did not answer within 0\.5 s: .*; the manifests are written"
    ):
        run([*SUBMIT, *NODES, "--run-dir", "runs/a"])


def test_without_kubectl_the_file_is_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(home))

    with pytest.raises(ResourceError, match=r"^kubectl is not on this machine; the manifests are written"):
        run([*SUBMIT, *NODES, "--run-dir", "runs/a"])
    assert (home / "runs/a/job/job.yaml").exists()
    with pytest.raises(ResourceError, match=r"^kubectl is not on this machine: run this where kubectl is$"):
        run(["submit", "status", "runs/a"])


@pytest.fixture
def dead_server(home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The real kubectl, with a server that refuses connections. Return what kubectl says then."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not here")
    cluster = {"name": "gone", "cluster": {"server": "http://127.0.0.1:9"}}
    context = {"name": "gone", "context": {"cluster": "gone", "user": ""}}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [cluster],
        "contexts": [context],
        "current-context": "gone",
    }
    (home / "kubeconfig").write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(home / "kubeconfig"))
    return "The connection to the server 127.0.0.1:9 was refused"


def test_the_real_kubectl_without_a_server(home: Path, dead_server: str) -> None:
    with pytest.raises(ResourceError) as caught:
        run([*SUBMIT, *NODES, "--run-dir", "runs/a"])
    said = rf"kubectl get failed: {re.escape(dead_server)} - [^;\n]*; the manifests are written, .*"
    assert re.fullmatch(said, str(caught.value))


def test_the_real_kubectl_knows_every_flag(home: Path, dead_server: str, tmp_path: Path) -> None:
    fake = FakeKubectl(tmp_path / "fake")
    fake.answer("get", "job.batch/a\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(fake.directory), prepend=":")
        assert run([*SUBMIT, *NODES, "--namespace", "ml", "--run-dir", "runs/a", "--resume"]) == 0
        for verb in ("status", "logs", "stop"):
            assert run(["submit", verb, "runs/a"]) == 0

    verbs = [words[2] if words[0] == "--namespace" else words[0] for words in fake.calls]
    assert verbs == ["get", "delete", "get", "wait", "apply", "apply", "get", "logs", "delete", "delete", "delete"]
    given = json.dumps({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}})
    for words in fake.calls:
        done = subprocess.run(["kubectl", *words], input=given, capture_output=True, text=True, timeout=30)
        assert dead_server in done.stderr or "127.0.0.1:9: connect: connection refused" in done.stderr, (
            words,
            done.stderr,
        )


def test_a_run_belongs_to_the_scheduler_that_it_was_last_handed_to(
    home: Path, kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SUBMIT, *NODES, "--run-dir", "runs/a"]) == 0
    kubectl.answer("get", "pods")
    batch_file = home / "runs/a/job/job.sbatch"
    batch_file.touch()
    os.utime(batch_file, (1, 1))
    capsys.readouterr()
    assert run(["submit", "status", "runs/a"]) == 0
    assert capsys.readouterr().out == "pods\n"

    os.utime(home / "runs/a/job/job.yaml", (0, 0))
    with pytest.raises(ConfigError, match="was written, but not submitted: run 'sbatch"):
        run(["submit", "status", "runs/a"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--image is missing"),
        (["--image", "i", "--kind", "pod"], "--kind pod is unknown: choose one of job, trainjob, rayjob"),
        (["--image", "i", "--job-name", "My_Job"], "--job-name My_Job is not a name in Kubernetes"),
        (["--image", "i", "--job-name", "a" * 48], "at most 47"),
        (["--image", "i", "--job-name", "9abc"], "--job-name 9abc is not a name in Kubernetes: begin with a lower-case letter"),
        (["--image", ""], "--image '' is not the name of an image"),
        (["--image", "r/t 1"], "--image r/t 1 is not the name of an image: give one without spaces"),
        (["--image", "i", "--namespace", "Foo_bar"], "--namespace Foo_bar is not a name in Kubernetes"),
        (["--image", "i", "--namespace", "a.b"], "--namespace a.b is not a name in Kubernetes"),
        (["--image", "i", "--claim", "Foo_bar"], "--claim Foo_bar is not a name in Kubernetes: use lower-case letters"),
        (["--image", "i", "--secret", "ok.too", "--secret", "Foo_bar"], "--secret Foo_bar is not a name in Kubernetes"),
        (["--image", "i", "--gpu-resource", "gpu"], "--gpu-resource gpu is not a resource with a domain: give DOMAIN/NAME"),
        (["--image", "i", "--working-dir", "app"], "--working-dir app is not an absolute path"),
        (["--image", "i", "--cpus", "0"], "--cpus 0 is no CPU"),
        (["--image", "i", "--memory", "0"], "--memory 0 is less than 1Mi: give a size with its unit"),
        (["--image", "i", "--memory", "64"], "--memory 64 is less than 1Mi: give a size with its unit"),
        (["--image", "i", "--memory", "4Gi", "--shm", "8Gi"], "--memory 4Gi must be more than --shm 8Gi"),
        (["--image", "i", "--memory", "8G"], "--memory 8G must be more than --shm 8Gi"),
        (["--image", "i", "--memory", "64 GB"], "--memory 64 GB is not a quantity of Kubernetes"),
        (["--image", "i", "--kind", "rayjob", "--device", "cpu", "--nproc-per-node", "4", "--cpus", "3"],
         "--cpus 3 is too few: Ray reserves 1 for each of the 4 processes of a pod: give --cpus 4 or more"),
        (["--image", "i", "--save-within", "0"], "--save-within 0 is not a number of seconds above 0"),
        (["--image", "i", "--user", "0"], "--user 0 is root"),
        (["--image", "i", "--retries", "-1"], "--retries -1 is negative: give 0 or more"),
        (["--image", "i", "--volume-path", "/tmp"], "--volume-path /tmp cannot be mounted"),
        (["--image", "i", "--volume-path", "runs"], "--volume-path runs cannot be mounted"),
        (["--image", "i", "--kind", "rayjob", "--backend", "fsdp"], "which only the backend ray uses: drop --backend fsdp"),
        (["--image", "i", "--kind", "rayjob", "--address=head:6379"], "the Ray cluster that the run joins: drop --address head:6379"),
        (["--image", "i", "--epochs", "0"], "epochs"),
        (["--image", "i", "--token-file", "t"], "--token-file is not a flag of kubernetes"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(home: Path, kubectl: FakeKubectl, words: list[str], message: str) -> None:
    with pytest.raises(DistributedError) as caught:
        run(["submit", "kubernetes", "--script", "train.py", *words])
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert list(home.iterdir()) == [home / "train.py"] and not kubectl.calls


# The operators


def test_a_trainjob_has_the_pods_in_a_runtime_of_its_own(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runtime, train = rendered(capsys, *NODES, "--kind", "trainjob")
    *_, job = rendered(capsys, *NODES)

    assert train["spec"] == {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": runtime["metadata"]["name"],
        },
        "trainer": {"numNodes": 2, "numProcPerNode": 8},
    }
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert (node["name"], container(node["template"])["name"]) == (
        "node",
        "node",
    )  # the names that the operator looks for
    assert container(node["template"])["command"] == container(job)["command"]
    # what Kubeflow Trainer's plugin for torch adds
    pet = {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "digits-1-node-0-0.digits-1",
        "PET_MASTER_PORT": "29500",
    }  # fmt: skip
    environ = {each["name"]: each["value"] for each in container(node["template"])["env"] if "value" in each}
    place = node_environment({**environ, **pet, "JOB_COMPLETION_INDEX": "1"}, nproc_per_node=8)
    assert place == NodeEnvironment(2, 1, "digits-1-node-0-0.digits-1", 29500, 8)


def test_a_rayjob_runs_the_command_on_a_head_without_gpus(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = rendered(capsys, "--kind", "rayjob", "--num-gpus", "8")

    spec = job["spec"]
    assert spec["entrypoint"] == (
        "python -m distributed.cli train --script train.py --num-gpus 8 --backend ray --address auto --run-dir /runs/digits-1 --resume"
    )
    head, (workers,) = spec["rayClusterSpec"]["headGroupSpec"], spec["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 1
    assert container(workers)["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert container(head)["resources"]["limits"] == {"cpu": "2", "memory": "8Gi"}
    assert head["rayStartParams"] == {"num-cpus": "0"}
    (before,) = pod(head)["initContainers"]
    assert before["command"] == ["mkdir", "-p", "/runs/digits-1"]
    (submitter,) = spec["submitterPodTemplate"]["spec"]["containers"]
    assert {"cpu", "memory"} == set(before["resources"]["limits"]) == set(submitter["resources"]["limits"])
    with pytest.raises(ConfigError, match=r"^'hidden size' cannot be a word of a RayJob's entrypoint"):
        run([*SUBMIT, "--kind", "rayjob", "--backend", "ray", "--dry-run", "--", "hidden size"])


@pytest.mark.parametrize("named", [(), ("--backend", "ray")])
def test_a_rayjob_of_two_nodes_joins_its_cluster(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...]
) -> None:
    """The command plans two nodes on a cluster that has what the manifest asks for."""
    needs_backend("ray")
    (job,) = rendered(capsys, *NODES, "--kind", "rayjob", *named, "--cpus", "64")

    command = shlex.split(job["spec"]["entrypoint"])
    assert command[:3] == ["python", "-m", "distributed.cli"]
    assert (command.count("--backend"), command[command.index("--address") + 1]) == (1, "auto")
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == 2
    limits = container(workers)["resources"]["limits"]
    there = {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}
    nodes = [
        {"NodeID": name, "NodeManagerHostname": name, "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": has}
        for name, has in [("head", {}), *((f"worker-{number}", there) for number in range(workers["replicas"]))]
    ]
    asked = []
    monkeypatch.setattr(starting, "check_address", asked.append)
    monkeypatch.setattr(starting, "ask", lambda address, patience_s: nodes)
    (home / "runs/digits-1").mkdir(parents=True)  # as the head's init container does
    words = [word.replace("/runs/", f"{home}/runs/") for word in command[3:]]
    assert run([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert asked == ["auto"] and re.search(
        r"backend +ray\n +processes +8 processes on each of 2 nodes, device cuda", shown
    ), shown


@pytest.mark.parametrize("kind", ["trainjob", "rayjob"])
def test_a_job_of_an_operator_says_that_it_was_not_tried(
    home: Path, kubectl: FakeKubectl, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    assert run([*SUBMIT, "--kind", kind, "--backend", "ray" if kind == "rayjob" else "fsdp", "--num-gpus", "8"]) == 0

    shown = capsys.readouterr()
    assert re.match(rf"{kind} \S+ was submitted\n", shown.out)
    assert shown.err.startswith("warning: Jobs of this kind were never run with Ku") and shown.err.count("\n") == 1
    (file,) = home.glob("runs/*/job/job.yaml")
    assert "\n# Jobs of this kind were never run with Ku" in file.read_text()


@pytest.mark.parametrize(
    "words", [("--kind", "trainjob", *NODES), ("--kind", "rayjob", "--backend", "ray", "--num-gpus", "8")]
)
def test_the_jobs_of_operators_fit_their_definitions(
    home: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    for document in rendered(capsys, *words, "--namespace", "ml", "--cpus", "8", "--memory", "64Gi"):
        found = definitions(document["kind"])
        assert found, document["kind"]
        for definition in found:
            assert errors_of(document, definition) == []
            assert errors_of({**document, "spec": {**document["spec"], "other": 1}}, definition)


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ({"replicas": 2, "ports": ["http", 80], "labels": {"any": "name"}}, []),
        ({"replica": 2}, ["Additional properties are not allowed ('replica' was unexpected)"]),
        ({"replicas": "two"}, ["'two' is not of type 'integer'"]),
        ({"ports": [None]}, ["None is not of type 'integer', 'string'"]),
        ({"labels": {"any": 1}}, ["1 is not of type 'string'"]),
    ],
)
def test_what_a_definition_does_not_have_is_found(spec: dict[str, Any], found: list[str]) -> None:
    port = {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
    properties = {
        "replicas": {"type": "integer", "format": "int32"},
        "ports": {"type": "array", "items": port},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
    }
    of_object = {"apiVersion": {"type": "string"}, "spec": {"type": "object", "properties": properties}}
    version = {"name": "v1", "schema": {"openAPIV3Schema": {"type": "object", "properties": of_object}}}

    assert errors_of({"apiVersion": "example.org/v1", "spec": spec}, {"spec": {"versions": [version]}}) == found
