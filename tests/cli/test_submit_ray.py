"""`distributed submit ray`: what it hands to Ray's Jobs API, what it refuses, and a job on a real Ray cluster."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed.cli.__main__ import run
from distributed.errors import ConfigError, DistributedError, ResourceError
from distributed.launcher.submit import ray_jobs
from tests import ray_clusters
from tests.cli.test_ray_cluster import COMMAND, weights_of
from tests.conftest import free_port, needs_backend, needs_library, patient, poll
from tests.ray_clusters import OPEN

pytestmark = [pytest.mark.timeout(800), pytest.mark.xdist_group("a cluster of Ray")]
SUBMIT = ("submit", "ray", "--script", "train.py")


@pytest.fixture(autouse=True)
def _ray() -> None:
    needs_backend("ray")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(ray_jobs.ADDRESS_VARIABLE, raising=False)
    (tmp_path / "train.py").write_text("from distributed import Trainer")
    return tmp_path


def test_a_job_plans_on_the_cluster_and_uploads_the_working_directory(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTRIBUTED_TOKEN", "a secret of thirty-two characters")
    flags = [
        "--num-nodes",
        "4",
        "--gpus-per-node",
        "8",
        "--storage",
        "/shared",
        "--exclude",
        "data",
        "--run-dir",
        "my run",
        "--dry-run",
    ]
    assert run([*SUBMIT, *flags, "--address", "http://head:8265", "--", "--own", "a b"]) == 0
    shown = capsys.readouterr().out
    assert (
        "entrypoint: mkdir -p '/shared/my run' && exec python -m distributed.cli train --script train.py --num-nodes 4 --gpus-per-node 8"
        " --backend ray --address auto --run-dir '/shared/my run' --resume -- --own 'a b'\n"
    ) in shown
    env = json.loads(shown.partition("runtime_env: ")[2])
    assert env["working_dir"] == str(here) and "data" in env["excludes"] and "runs" in env["excludes"]
    assert env["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "330"}  # not the three seconds of Ray
    assert "secret" not in shown and not (here / "my run").exists()
    monkeypatch.setenv(ray_jobs.ADDRESS_VARIABLE, "http://there:8265")
    assert run([*SUBMIT, "--nproc-per-node", "2", "--run-dir", "run", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "address: http://there:8265\n" in shown and f"--run-dir {here}/run --resume" in shown
    assert run([*SUBMIT, "--run-dir", "run", "--dry-run"]) == 0  # the cluster counts its GPUs
    assert f"train --script train.py --backend ray --address auto --run-dir {here}/run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ([], ConfigError, "needs the address of the cluster's dashboard: add --address http://HOST:8265"),
        (["--address", "ray://head:10001"], ConfigError, "give that of the dashboard, such as http://head:8265"),
        (["--address", "head"], ConfigError, "give that of the dashboard, such as http://head:8265"),
        (["--address", "http://u:pass@head:1"], ConfigError, "give a token in RAY_AUTH_TOKEN"),
        (["--address", "http://head:1", "--storage", "runs"], ConfigError, "--storage runs is not an absolute path"),
        (["--address", "http://head:1", "--backend", "fsdp"], ConfigError, "--backend fsdp cannot be submitted to Ray"),
        (["--address", "http://head:1", "--batch-size", "0"], ConfigError, "batch_size=0 must be at least 1"),
        (["--address", "http://head:1", "--script", "ABSOLUTE"], ConfigError, "is not a path below the working directory"),
        (["--address", "http://head:1", "--script", "../train.py"], ConfigError, "--script ../train.py is not a path below the"),
        (["--address", "http://no-host.invalid:1"], ResourceError, "no Ray Jobs API answers at http://no-host.invalid:1 ("),
        (["--address", "http://127.0.0.1:CLOSED"], ResourceError, "(Connection refused): start the head with 'ray start"),
    ],
)  # fmt: skip
def test_what_cannot_be_submitted_is_refused_in_one_line(
    here: Path, words: list[str], kind: type[DistributedError], said: str
) -> None:
    (here.parent / "train.py").touch()
    words = [word.replace("CLOSED", str(free_port())).replace("ABSOLUTE", str(here / "train.py")) for word in words]
    with pytest.raises(kind) as caught:
        run([*SUBMIT, "--run-dir", "run", *words])
    assert said in str(caught.value) and "\n" not in str(caught.value) and "pass" not in str(caught.value)
    assert not (here / "run").exists()  # so that the same command can be given again


def test_without_ray_the_command_that_installs_it_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_jobs, "is_installed", lambda name: False)
    with pytest.raises(ResourceError, match=r"Ray is not installed here: run pip install 'distributed-trainer\[ray\]'"):
        run([*SUBMIT, "--address", "http://head:1"])


@contextlib.contextmanager
def answering(status: int, text: str) -> Iterator[str]:
    """Yield the address of a server that gives this answer to everything."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (401, "Unauthorized: Missing authentication token", "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as on the cluster"),
        (403, "Forbidden: Invalid authentication token", "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as on the cluster"),
        (404, "what?", "refused: Version check returned 404."),
        (500, "the disk of the head is full", "500 Server Error"),
        (200, "not JSON", "refused: "),
    ],
)  # fmt: skip
def test_the_words_of_the_server_are_said(here: Path, status: int, text: str, said: str) -> None:
    with answering(status, text) as address, pytest.raises(ResourceError) as caught:
        run([*SUBMIT, "--run-dir", "run", "--address", address])
    message = str(caught.value)
    assert message.startswith(f"the Ray Jobs API at {address} refused: ") and said in message and "\n" not in message
    assert not (here / "run").exists()


class JobsApi:
    """A server that answers as Ray's Jobs API. `jobs` are the states of its jobs by ID, and `upload` answers an upload."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.upload = 200
        outer = self

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/api/version":
                    self.answer(200, {"ray_version": "2.50.0"})
                elif self.path == "/api/jobs/":
                    self.answer(200, list(outer.jobs.values()))
                else:
                    found = outer.jobs.get(self.path.rpartition("/")[2])
                    self.answer(404 if found is None else 200, found)

            def do_PUT(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.answer(outer.upload, "Maximum request body size 104857600 exceeded")

            def do_POST(self) -> None:
                entrypoint = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["entrypoint"]
                name = f"raysubmit_{len(outer.jobs)}"
                outer.jobs[name] = {
                    "submission_id": name, "type": "SUBMISSION", "status": "RUNNING", "entrypoint": entrypoint,
                    "message": "Job is currently running.",
                }  # fmt: skip
                self.answer(200, {"job_id": name, "submission_id": name})

            def answer(self, status: int, content: Any) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def api() -> Iterator[JobsApi]:
    api = JobsApi()
    with api.server:
        threading.Thread(target=api.server.serve_forever, daemon=True).start()
        yield api
        api.server.shutdown()


def test_a_living_job_is_not_submitted_again(here: Path, api: JobsApi) -> None:
    """Its ID is needed to follow and to stop it."""
    submit = [*SUBMIT, "--run-dir", "run", "--address", api.address]
    assert run(submit) == 0
    file = here / "run" / "job" / ray_jobs.FILE
    before = file.read_text()
    with pytest.raises(ConfigError, match=r"^'run' has a job already .*: add --resume to submit it again"):
        run(submit)
    with pytest.raises(
        ConfigError, match=r"^job raysubmit_0 of this run has not ended \(RUNNING\): .*'distributed submit stop run'"
    ):
        run([*submit, "--resume"])
    assert file.read_text() == before and len(api.jobs) == 1

    api.jobs["raysubmit_0"]["status"] = "STOPPED"
    assert run([*submit, "--resume"]) == 0
    assert json.loads(file.read_text())["id"] == "raysubmit_1"
    del api.jobs["raysubmit_1"]  # the cluster was started anew
    assert run([*submit, "--resume"]) == 0
    content = json.loads(file.read_text()) | {"address": f"http://127.0.0.1:{free_port()}"}
    file.write_text(json.dumps(content))
    with pytest.raises(
        ResourceError, match=r"^whether the last job .*; if its cluster has ended, delete 'run/job/ray\.json'$"
    ):
        run([*submit, "--resume"])
    assert json.loads(file.read_text()) == content
    file.write_text("{")
    assert run([*submit, "--resume"]) == 0


def test_a_working_directory_that_is_too_large_is_said(here: Path, api: JobsApi) -> None:
    api.upload = 413
    with pytest.raises(ResourceError) as caught:
        run([*SUBMIT, "--run-dir", "run", "--address", api.address])
    assert str(caught.value) == (
        f"the working directory is too large for the Ray Jobs API at {api.address} (limit 100 MiB): leave files out with --exclude or"
        " .gitignore"
    )
    assert not (here / "run").exists()


def test_the_error_of_a_failed_job_comes_first_and_is_wrapped(
    here: Path, api: JobsApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SUBMIT, "--run-dir", "run", "--address", api.address]) == 0
    api.jobs["raysubmit_0"] |= {
        "status": "FAILED", "driver_exit_code": 1,
        "message": "Job entrypoint command failed with exit code 1, last available logs:\nstep 1\n"
        f"ValueError: an earlier one\nerror: rank 0 failed: {'many words ' * 20}\nto resume: train\n",
    }  # fmt: skip
    capsys.readouterr()
    assert run(["submit", "status", "run"]) == 0
    state, error, *more = capsys.readouterr().out.splitlines()
    assert state == "job raysubmit_0  FAILED  exit code 1" and error.startswith("  error: rank 0 failed: many words")
    assert all(len(line) <= 80 for line in more[:-1]) and "  to resume: train" in more
    assert more.index("  Job entrypoint command failed with exit code 1, last available logs:") > more.index(
        "  to resume: train"
    )
    assert "  ValueError: an earlier one" in more


def test_a_run_that_was_not_submitted_is_named(here: Path) -> None:
    with pytest.raises(ConfigError, match="'nowhere' is not a submitted run"):
        run(["submit", "logs", "nowhere"])


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "it is not JSON"), ("[]", "it is not an object"), ('{"id": 1}', "it has id=1, which is not a text"),
     ('{"id": "a"}', "it lacks 'address'")],
)  # fmt: skip
def test_a_file_of_a_job_that_cannot_be_read_is_one_line(here: Path, text: str, why: str) -> None:
    (here / "run" / "job").mkdir(parents=True)
    (here / "run" / "job" / ray_jobs.FILE).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"cannot be read ({why}): submit the run again with --resume")):
        run(["submit", "status", "run"])


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a cluster of two CPUs with a dashboard, and yield the address of its Jobs API."""
    needs_library("aiohttp_cors", "ray")  # of ray[default]
    port = free_port()
    flags = [
        "--num-cpus=2", "--include-dashboard=true", f"--dashboard-port={port}", f"--dashboard-agent-listen-port={free_port()}",
    ]  # fmt: skip
    with ray_clusters.head(tmp_path_factory.mktemp("dashboard"), *flags, WAIT_S="0.1"):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.cluster
def test_a_job_trains_saves_when_it_is_stopped_and_goes_on(run_cli: Any, tmp_path: Path, dashboard: str) -> None:
    """The Jobs API ends a job after three seconds by itself, and with SIGTERM for all of its processes at once."""
    slow = tmp_path / "slow"  # while this file exists, a step takes half a second
    wait = f"0.5 if os.path.exists({str(slow)!r}) else 0"
    (tmp_path / "train.py").write_text(COMMAND.replace('float(os.environ.get("WAIT_S", "0"))', wait))
    flags = ["--script", "train.py", "--nproc-per-node", "2", "--device", "cpu"]
    expected = run_cli(["train", *flags, "--run-dir", "expected"], cwd=tmp_path)
    storage = tmp_path / "storage"

    def ask(*words: str) -> str:
        done = run_cli(["submit", *words], cwd=tmp_path, env=OPEN, timeout=90)
        assert done.returncode == 0 and done.stderr == "", done.output
        return str(done.stdout)

    slow.touch()
    python = ["--python", sys.executable, "--exclude", "expected", "--exclude", "storage"]
    submit = ["ray", *flags, "--address", dashboard, "--run-dir", "run", "--storage", str(storage), *python]
    assert re.match(r"job raysubmit_\w+ was submitted to http", ask(*submit))
    events = storage / "run" / "events.jsonl"
    poll(
        lambda: events.exists() and events.read_text().count("checkpoint_saved") > 1,
        patient(120),
        lambda: ask("logs", "run"),
    )
    assert "RUNNING" in ask("status", "run")
    again = run_cli(["submit", *submit, "--resume"], cwd=tmp_path, env=OPEN, timeout=90)
    assert again.returncode == 2 and "has not ended (RUNNING)" in again.stderr, again.output
    assert "was told to save and end; to continue the run" in ask("stop", "run")
    poll(lambda: "STOPPED" in ask("status", "run"), patient(60), lambda: ask("logs", "run"))
    assert "SIGTERM: stopping after this step" in ask("logs", "run")
    saved = [json.loads(line)["step"] for line in events.read_text().splitlines() if "checkpoint_saved" in line]
    assert saved[-1] < 80 and '"preempted"' in events.read_text()

    slow.unlink()
    ask(*submit, "--resume")
    poll(lambda: "SUCCEEDED" in ask("status", "run"), patient(120), lambda: ask("logs", "run"))
    log = ask("logs", "run")
    assert f"resumed from step-{saved[-1]:08d}" in log and weights_of(log) == weights_of(expected.stdout)
