"""Run a job in Kubernetes: write RUN/job/job.yaml, and call kubectl.

The file holds no secret. The Secret with the token of the nodes goes to kubectl's standard input, because other users can see the
arguments of a process.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.config.addresses import is_address
from distributed.config.kinds import OBJECT, TEXT, check_kinds
from distributed.config.reading import MAX_YAML_BYTES, parse_yaml, read_bytes
from distributed.errors import ConfigError, ResourceError
from distributed.launcher.submit.job import BatchJob, reading
from distributed.launcher.submit.manifests import (
    LABEL,
    KubernetesOptions,
    check_name,
    metadata,
    plain_manifests,
    secret_name,
)
from distributed.launcher.submit.operators import rayjob_manifests, trainjob_manifests
from distributed.launching.secret import shared_secret
from distributed.runs.directory import JOB

if TYPE_CHECKING:
    import yaml

FILE = "job.yaml"
KINDS: Mapping[str, Callable[[BatchJob, KubernetesOptions], list[dict[str, Any]]]] = {
    "job": plain_manifests,
    "trainjob": trainjob_manifests,
    "rayjob": rayjob_manifests,
}
_ANSWER_S = 60.0  # time limit for a command of kubectl
_ENDING_S = 60  # time for pods to be removed after they have saved
_LIKE_A_NUMBER = re.compile(r"[-+.]?\d|[-+]?\.\w|[yYnN]$")
_LOG_LINE = re.compile(r"[EWI]\d{4} \d\d:\d\d:\d\d\.\d+ ")  # kubectl's own log, beside its message
_DOCUMENT_END = re.compile(rb"^---\s*$", re.MULTILINE)  # between the objects in the file
_OPERATORS = {"trainjob": "Kubeflow Trainer", "rayjob": "KubeRay"}


def manifests(job: BatchJob, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Return the objects of the run, without the Secret. Raises ConfigError if the job cannot be one in Kubernetes."""
    check_name(job.name)
    if options.kind not in KINDS:
        raise ConfigError(f"--kind {options.kind} is unknown: choose one of {', '.join(KINDS)}")
    return KINDS[options.kind](job, options)


def manifest_text(job: BatchJob, options: KubernetesOptions) -> str:
    """Return the objects of the run as YAML, with the commands that submit them in the first lines.

    Args:
        job: the run.
        options: the options for Kubernetes.

    Returns:
        The content of the file.

    Raises:
        ConfigError: the run cannot be a job of this kind.
    """
    import yaml

    where = "" if options.namespace is None else f" --namespace {options.namespace}"
    lines = ["# Written by `distributed submit kubernetes`. To submit it: kubectl apply -f FILE"]
    if job.plan.num_nodes > 1:
        lines += [
            "# The nodes need the same secret of at least 16 characters. To make one from a file:",
            f"# kubectl{where} create secret generic {secret_name(job)} --from-file=token=FILE",
        ]
    lines += [f"# {each}" for each in warnings_about(job, options)]
    text = yaml.dump_all(manifests(job, options), Dumper=_dumper(), sort_keys=False, width=120)
    return "\n".join(lines) + "\n" + text


def _dumper() -> type[yaml.SafeDumper]:
    """Return PyYAML's dumper, changed to also quote `y`, `n` and every string that begins like a number.

    PyYAML quotes only the strings that its own reader takes for numbers. Other readers of YAML, such as that of kubectl, read
    `1e-4`, `08` or `.5` as numbers too, and `y` as true.
    """
    import yaml

    class Quoting(yaml.SafeDumper):
        pass

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if _LIKE_A_NUMBER.match(text) else None)

    Quoting.add_representer(str, represent)
    return Quoting


def warnings_about(job: BatchJob, options: KubernetesOptions) -> list[str]:
    """Return what the user must know about this job, one sentence each."""
    found = []
    checkpoint_dir = job.settings.config.checkpoint_dir if job.settings is not None else None
    if options.claim is None and is_address(checkpoint_dir):
        found.append(
            f"There is no --claim: the run continues from its checkpoints in {checkpoint_dir}, but its other files, such as metrics and"
            " logs, are lost with the pod of node 0."
        )
    elif options.claim is None:
        found.append("There is no --claim: the files of the run are lost with the pod of node 0.")
    if options.kind in _OPERATORS:
        name = _OPERATORS[options.kind]
        found.append(
            f"Jobs of this kind were never run with {name}: only their fields were compared with the definitions of {name}."
        )
    return found


def submit(job: BatchJob, options: KubernetesOptions, *, resume: bool) -> str:
    """Write RUN/job/job.yaml and hand it to kubectl, with a secret for the nodes. Return the name of the main object.

    With `resume`, a job of this name in the cluster is deleted first. The new job is submitted when all pods of an earlier job
    of this name have saved and ended.

    Raises:
        ConfigError: the run directory cannot be used, or there is such a job.
        ResourceError: there is no kubectl here, or the server refused. The file is written anyway.
    """
    text = manifest_text(job, options)
    with job.writing(FILE, resume=resume) as file:
        try:
            found = _find(job, options)
            if found and not resume:
                raise ConfigError(
                    f"{found} is in the cluster already: choose another name with --job-name, or end it with 'kubectl delete {found}'"
                )
            _write(file, text)
            return _apply(job, options, file, found)
        except ResourceError as error:
            _write(file, text)
            words = "the manifests are written, their first lines say how to submit them"
            raise ResourceError(f"{error}; {words}: {file}") from None


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)


def _find(job: BatchJob, options: KubernetesOptions) -> str:
    """Return the name of the job in the cluster, or "" if it is not there."""
    if shutil.which("kubectl") is None:
        raise ResourceError("kubectl is not on this machine")
    return _ask(*_namespace(options.namespace), "get", options.kind, job.name, "--ignore-not-found", "--output=name")


def _apply(job: BatchJob, options: KubernetesOptions, file: Path, found: str) -> str:
    """End the job `found`, if it is not "", and submit the manifests in `file`."""
    where, patience = _namespace(options.namespace), options.save_within + _ENDING_S
    if found:  # the fields of a Job cannot be changed
        wait = ("--cascade=foreground", f"--timeout={patience}s")
        _ask(*where, "delete", found, *wait, seconds=patience + _ANSWER_S)
    _wait_for_pods(job, where, patience)
    if job.plan.num_nodes > 1:
        # Server-side: a client would keep a copy of the secret in an annotation.
        apply = ("apply", "--server-side", "--force-conflicts", "-f", "-")
        _ask(*where, *apply, given=json.dumps(_secret(job, options)))
    _ask("apply", "-f", str(file))
    return f"{options.kind} {job.name}"


def _wait_for_pods(job: BatchJob, where: Sequence[str], patience: int) -> None:
    """Wait until no pod of an earlier job of this name is left. After `stop`, pods of a deleted job may still save."""
    own = ("--selector", f"{LABEL}={job.name}")
    if not _ask(*where, "get", "pods", *own, "--output=name"):
        return
    try:
        _ask(*where, "wait", "--for=delete", "pods", *own, f"--timeout={patience}s", seconds=patience + _ANSWER_S)
    except ResourceError as error:
        if "no matching resources" not in str(error):  # they ended before kubectl looked for them
            raise


def _secret(job: BatchJob, options: KubernetesOptions) -> dict[str, Any]:
    """Return the Secret of the nodes: the one of DISTRIBUTED_TOKEN, or a new one."""
    token = shared_secret() or secrets.token_hex(32).encode()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**metadata(job, options), "name": secret_name(job)},
        "data": {"token": base64.b64encode(token).decode()},
    }


def status(run_dir: Path) -> str:
    """Return the state of the job and the pods of a submitted run, as kubectl prints it."""
    kind, name, where = _submitted(run_dir)
    found = _ask(*where, "get", f"{kind},pods", "--selector", f"{LABEL}={name}")
    return found or f"{kind} {name} is not in the cluster any more"


def logs(run_dir: Path) -> Iterator[str]:
    """Yield the output of all pods of a submitted run. Each line begins with the name of its pod."""
    _, name, where = _submitted(run_dir)
    every = ("--prefix", "--tail=-1", "--max-log-requests=1000", "--ignore-errors")
    is_empty = True
    with _start(*where, "logs", "--selector", f"{LABEL}={name}", *every) as running:
        assert running.stdout is not None
        for line in running.stdout:
            is_empty = False
            yield line
        _, errors = running.communicate()
    if running.returncode != 0:
        raise _refusal("logs", running.returncode, errors)
    if is_empty:
        status = f"distributed submit status {shlex.quote(str(run_dir))}"
        yield f"no output: {name} has no pods, or they have written nothing yet; see '{status}'\n"


def stop(run_dir: Path) -> str:
    """End a run for good and return the name of its job. Its pods save first, for which they have `save_within` seconds."""
    kind, name, where = _submitted(run_dir)
    also = {"trainjob": "trainingruntime"}.get(kind, "service")
    for each in (f"{kind}/{name}", f"{also}/{name}", f"secret/{name}-token"):
        _ask(*where, "delete", each, "--ignore-not-found", "--wait=false")
    return f"{kind} {name}"


def _submitted(run_dir: Path) -> tuple[str, str, Sequence[str]]:
    """Return (kind, name, kubectl's flags for the namespace) of the job of a run. Raises ConfigError if its file cannot be read."""
    path = run_dir / JOB / FILE
    with reading(path):
        document = parse_yaml(_DOCUMENT_END.split(read_bytes(path, MAX_YAML_BYTES))[-1])  # the job is the last object
        check_kinds(document, {"kind": TEXT, "metadata": OBJECT})
        kind, found = document.get("kind", "").lower(), document.get("metadata", {})
        check_kinds(found, {"name": TEXT, "namespace": TEXT})
        if kind not in KINDS or "name" not in found:
            raise ValueError(f"does not end with a {', '.join(KINDS)} that has a name")
    return kind, found["name"], _namespace(found.get("namespace"))


def _namespace(name: str | None) -> Sequence[str]:
    return () if name is None else ("--namespace", name)


def _ask(*arguments: str, given: str | None = None, seconds: float | None = None) -> str:
    """Run kubectl and return its output. Raises ResourceError with the server's own words."""
    verb, seconds = _verb(arguments), _ANSWER_S if seconds is None else seconds
    with _start(*arguments, given=given) as running:
        try:
            output, errors = running.communicate(given, timeout=seconds)
        except subprocess.TimeoutExpired:
            running.kill()
            raise ResourceError(
                f"kubectl {verb} did not answer within {seconds:g} s: is the cluster up, and does 'kubectl version' reach it?"
            ) from None
    if running.returncode != 0:
        raise _refusal(verb, running.returncode, errors)
    return output.strip()


def _start(*arguments: str, given: str | None = None) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            ["kubectl", *arguments], stdin=subprocess.DEVNULL if given is None else pipe, stdout=pipe, stderr=pipe, text=True
        )  # fmt: skip
    except FileNotFoundError:
        raise ResourceError("kubectl is not on this machine: run this where kubectl is") from None


def _verb(arguments: Sequence[str]) -> str:
    return arguments[2] if arguments[0] == "--namespace" else arguments[0]


def _refusal(verb: str, code: int, errors: str) -> ResourceError:
    words = " ".join(line.strip() for line in errors.splitlines() if line.strip() and not _LOG_LINE.match(line))
    return ResourceError(f"kubectl {verb} failed: {words or f'exit code {code}'}")
