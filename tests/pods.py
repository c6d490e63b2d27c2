"""A cluster for manifests of Kubernetes: a small controller of indexed Jobs, and pods that are processes on `Machines`.

Each pod has a machine of its own: network, host name, process ids, a root file system that is read-only if its manifest says so, and
the volumes, variables, command and user of its manifest. A name of a headless Service has an address one second after its pod has
started. What a Job does not say in its manifest, no pod gets. Nothing here is Kubernetes itself: there is no API server.
"""

from __future__ import annotations

import base64
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import MARK, Started, poll
from tests.machines import Machines

ROOT = Path(__file__).resolve().parents[1]
INDEX_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_DNS_S = 1.0  # from the start of a pod to the address of its name
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "sys")


class Pod:
    """A pod: its number in the Job, its machine, and the processes of its only container."""

    def __init__(self, index: int, machine: int, running: Started) -> None:
        self.index, self.machine, self.running = index, machine, running
        self.began, self.is_disrupted, self._is_lost = time.monotonic(), False, False
        self._killed_at: float | None = None  # when the grace period of an evicted pod is over

    @property
    def output(self) -> str:
        return self.running.output

    @property
    def code(self) -> int | None:
        """The exit code of the container, or None while it runs."""
        code: int | None = self.running.process.poll()
        return code if code is None or not self._is_lost else 128 + signal.SIGKILL  # unshare returns 1 then

    def signal(self, number: int) -> None:
        """Send a signal to the first process in the pod."""
        children = Path(f"/proc/{self.running.pid}/task/{self.running.pid}/children")
        (first,) = poll(lambda: children.read_text().split(), 10, lambda: f"no process\n{self.output}")
        os.kill(int(first), number)

    def kill(self) -> None:
        """End the pod at once: nothing in it notices."""
        self._is_lost = True
        self.signal(signal.SIGKILL)

    def evict(self, grace_s: float) -> None:
        """Ask the pod to end within `grace_s`, as a drained machine does."""
        self.is_disrupted = True
        self._killed_at = time.monotonic() + grace_s
        self.signal(signal.SIGTERM)

    def kill_late(self) -> None:
        """Kill the pod if its grace period is over."""
        if self.code is None and self._killed_at is not None and time.monotonic() > self._killed_at:
            self.kill()


class Cluster:
    """The objects of a run, and the pods of its Job.

    Args:
        objects: what `kubectl apply` was given.
        machines: one for each pod that will ever start.
        start: starts a command.
        claims: PersistentVolumeClaim -> directory.
        image: path in the image -> directory, besides Python and this package.
    """

    def __init__(
        self, objects: list[dict[str, Any]], machines: Machines, start: Callable[..., Started], directory: Path, *,
        claims: dict[str, Path], image: dict[str, Path],
    ) -> None:  # fmt: skip
        (self._job,) = [each for each in objects if each["kind"] == "Job"]
        self._services = [each for each in objects if each["kind"] == "Service"]
        self._secrets = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "Secret"}
        self._machines, self._start, self._directory = machines, start, directory
        self._claims, self._image = claims, image
        self._spec = self._job["spec"]
        self._indexes: list[int] = list(range(self._spec["completions"]))
        self.name: str = self._job["metadata"]["name"]
        self.pods: list[Pod] = []  # all that were ever started
        self.failures: Counter[int] = Counter()  # by index
        self.succeeded: set[int] = set()
        self.why = ""  # the Job failed, or ""
        self._judged: set[int] = set()  # ids of pods whose end was looked at
        for index in self._indexes:
            self._start_pod(index)

    def pod(self, index: int) -> Pod:
        """Return the newest pod of an index."""
        return [each for each in self.pods if each.index == index][-1]

    def lose(self, index: int) -> None:
        """Take the machine of a pod away: from the network first, so that the other pods hear nothing of the end."""
        pod = self.pod(index)
        self._machines.link(pod.machine, "down")
        pod.kill()

    def evict(self, index: int) -> None:
        """Ask a pod to end within the grace period of its manifest."""
        self.pod(index).evict(self._pod_spec["terminationGracePeriodSeconds"])

    @property
    def output(self) -> str:
        """What all pods have printed."""
        return "\n".join(f"--- pod {each.index} on machine {each.machine}\n{each.output}" for each in self.pods)

    def wait_for(self, what: Callable[[], Any], seconds: float) -> Any:
        """Do the work of the controller until `what()` is true or the Job has ended."""

        def step() -> Any:
            self._reconcile()
            return what() or self.is_over

        poll(step, seconds, lambda: f"it did not come\n{self.output}")
        found = what()
        assert found, f"the Job has ended: {self.why or 'complete'}\n{self.output}"
        return found

    def finish(self, seconds: float) -> None:
        """Wait until the Job is complete."""
        self.wait_for(lambda: self.succeeded == set(self._indexes), seconds)

    @property
    def is_over(self) -> bool:
        return bool(self.why) or self.succeeded == set(self._indexes)

    # ------------------------------------------------------------------ the controller

    def _reconcile(self) -> None:
        self._write_names()
        for pod in self.pods:
            pod.kill_late()
            if pod.code is not None and id(pod) not in self._judged:
                self._judged.add(id(pod))
                self._judge(pod)

    def _judge(self, pod: Pod) -> None:
        """Do what the Job says about a pod that has ended. Nothing answers at its address any more."""
        self._machines.link(pod.machine, "down")
        if pod.code == 0:
            self.succeeded.add(pod.index)
            return
        action = self._action(pod)
        if action == "FailJob":
            self.why = f"pod {pod.index} ended with {pod.code}"
        elif action == "Count":
            self.failures[pod.index] += 1
            if self.failures[pod.index] > self._spec["backoffLimitPerIndex"]:
                self.why = f"pod {pod.index} failed too often"
        if not self.why:
            self._start_pod(pod.index)

    def _action(self, pod: Pod) -> str:
        """Return the action of the first rule that fits a failed pod."""
        for rule in self._spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes and codes["containerName"] == self._container["name"]:
                assert codes["operator"] == "In"
                if pod.code in codes["values"]:
                    return str(rule["action"])
            for condition in rule.get("onPodConditions", ()):
                if condition == {"type": "DisruptionTarget", "status": "True"} and pod.is_disrupted:
                    return str(rule["action"])
        return "Count"

    # ------------------------------------------------------------------ names

    def _write_names(self) -> None:
        """Write the names of this cluster where each machine looks for them."""
        labels = self._spec["template"]["metadata"]["labels"]
        lines = ["127.0.0.1 localhost"]
        for service in self._services:
            if service["spec"]["selector"].items() <= labels.items() and service["spec"]["publishNotReadyAddresses"]:
                for pod in self.pods:
                    if pod.code is None and time.monotonic() - pod.began > _DNS_S:
                        where = self._machines.addresses[pod.machine]
                        lines.append(f"{where} {self.name}-{pod.index}.{service['metadata']['name']}")
        for pod in self.pods:
            own = f"{self._machines.addresses[pod.machine]} {self.name}-{pod.index}"
            self._machines.write_hosts(pod.machine, "\n".join([*lines, own, ""]))

    # ------------------------------------------------------------------ pods

    @property
    def _pod_spec(self) -> dict[str, Any]:
        found: dict[str, Any] = self._spec["template"]["spec"]
        return found

    @property
    def _container(self) -> dict[str, Any]:
        (found,) = self._pod_spec["containers"]
        return dict(found)

    def _start_pod(self, index: int) -> None:
        machine = len(self.pods)
        place = self._directory / f"pod-{machine}"
        place.mkdir(parents=True)
        script = place / "start.sh"
        script.write_text(self._script(index, place))
        unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts"]
        self.pods.append(
            Pod(index, machine, self._start([*self._machines.on(machine), *unshare, "sh", "-e", str(script)]))
        )
        self._write_names()

    def _script(self, index: int, place: Path) -> str:
        """Return the commands that make the root file system and the volumes of a pod and start its container."""
        new, pod = Path("/mnt/root"), self._pod_spec
        lines = [f"hostname {self.name}-{index}", "mount -t tmpfs -o mode=755 pod /mnt", f"mkdir {new}"]

        def bind(source: Path, target: str, how: str = "--rbind") -> None:
            lines.append(f"mkdir -p {new}{target} && mount {how} {source} {new}{target}")

        for name in _SYSTEM:
            if Path("/", name).is_symlink():
                lines.append(f"cp -a /{name} {new}/{name}")
            elif Path("/", name).is_dir():
                bind(Path("/", name), f"/{name}")
                lines.append(f"mount -o remount,bind,ro {new}/{name}")
        bind(Path("/dev"), "/dev")
        lines.append(f"mkdir {new}/proc && mount -t proc proc {new}/proc")
        volumes = {each["name"]: each for each in pod["volumes"]}
        for mount in self._container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
                lines.append(f"mkdir -p {new}{mount['mountPath']}")
                lines.append(f"mount -t tmpfs -o mode=1777,size={size} shm {new}{mount['mountPath']}")
            else:
                bind(self._volume(volume, place), mount["mountPath"])
        for path in _python():
            bind(path, str(path), "--bind")
        for path, source in self._image.items():
            bind(source, path, "--bind")
        if self._container["securityContext"]["readOnlyRootFilesystem"]:
            lines.append("mount -o remount,ro /mnt")
        return "\n".join([*lines, f"exec chroot {new} {self._command(index)}", ""])

    def _volume(self, volume: dict[str, Any], place: Path) -> Path:
        """Return the directory of a volume, writable by the group of the pod's volumes."""
        if "persistentVolumeClaim" in volume:
            found = self._claims[volume["persistentVolumeClaim"]["claimName"]]
        else:
            assert volume["emptyDir"] == {}
            found = place / str(volume["name"])
            found.mkdir()
        os.chown(found, 0, self._pod_spec["securityContext"]["fsGroup"])
        found.chmod(0o2775)
        return found

    def _command(self, index: int) -> str:
        """Return the command of the container with its variables, as the user of its manifest, without any right of root."""
        rights, container = self._pod_spec["securityContext"], self._container
        assert rights["runAsNonRoot"] and rights["runAsUser"] > 0
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        user = [
            "setpriv", f"--reuid={rights['runAsUser']}", f"--regid={rights['runAsGroup']}", f"--groups={rights['fsGroup']}",
            "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all",
        ]  # fmt: skip
        environ = {
            "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",  # the image's
            "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": f"{self.name}-{index}",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            **{key: self._decoded(name, key) for name in self._whole_secrets for key in self._secrets[name]},
            **{each["name"]: self._value(each, index) for each in container["env"]},
        }
        given = [f"{name}={value}" for name, value in environ.items()]
        where = container.get("workingDir", "/")
        mark = f'{MARK}="${MARK}"'  # by which the end of the test finds what is left of the pod
        started = shlex.join([*given, *container["command"], *container.get("args", ())])
        return f"{shlex.join([*user, 'env', f'--chdir={where}', '-i'])} {mark} {started}"

    def _value(self, variable: dict[str, Any], index: int) -> str:
        if "value" in variable:
            return str(variable["value"])
        if "fieldRef" in variable["valueFrom"]:
            assert variable["valueFrom"]["fieldRef"]["fieldPath"] == INDEX_FIELD
            return str(index)
        reference = variable["valueFrom"]["secretKeyRef"]
        return self._decoded(reference["name"], reference["key"])

    @property
    def _whole_secrets(self) -> list[str]:
        """The names of the Secrets whose keys all become variables."""
        return [each["secretRef"]["name"] for each in self._container.get("envFrom", ())]

    def _decoded(self, secret: str, key: str) -> str:
        return base64.b64decode(self._secrets[secret][key]).decode()


def _python() -> list[Path]:
    """Return the directories of Python, its packages and this package that are not below /usr, none below another."""
    asked = {ROOT, Path(sys.prefix), Path(sys.base_prefix), *(Path(each) for each in sys.path if Path(each).is_dir())}
    found = sorted(each for each in asked if each.is_absolute() and not each.is_relative_to("/usr"))
    return [each for each in found if not any(each != other and each.is_relative_to(other) for other in found)]
