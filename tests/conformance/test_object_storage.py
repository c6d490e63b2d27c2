"""Runs whose checkpoints, or whose whole directory, are in object storage: S3 as moto serves it on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.conformance.runs import FULL, STEPS, arguments, assert_same, digests, events, newest, progress
from tests.conftest import describe, needs_backend
from tests.object_storage import BUCKET, Fault, complete_checkpoints, s3_server

pytestmark = pytest.mark.timeout(600)
pytest.importorskip("s3fs", reason="object storage needs s3fs")
ADDRESS = f"s3://{BUCKET}/mine"
PAGE = (Path(__file__).resolve().parents[2] / "docs/object-storage.md").read_text()
LAST = f"step-{STEPS:08d}"


def said_in(done):
    """Return the errors of a command, without the line that a busy machine shows."""
    return re.sub(r"^waiting for an answer from .*\n", "", done.stderr)


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


@pytest.fixture
def s3(server):
    server.calm()
    return server


@pytest.fixture(scope="module")
def clean(tmp_path_factory, run_cli_once):
    """Return the directory of an undisturbed run without object storage."""
    out = tmp_path_factory.mktemp("clean")
    done = run_cli_once(arguments(out))
    assert done.returncode == 0, done.output
    return out


def uploaded(run):
    return [
        event["checkpoint"]
        for event in map(json.loads, (run / "events.jsonl").read_text().splitlines())
        if event["event"] == "checkpoint_uploaded"
    ]


@pytest.mark.parametrize(
    ("backend", "world"),
    [
        ("pytorch-ddp", 2),
        pytest.param("single", 1, marks=FULL),
        *(pytest.param(name, 2, marks=FULL) for name in ("fsdp", "deepspeed", "horovod", "ray")),
    ],
)
def test_checkpoints_are_copied_and_another_machine_resumes_from_them(run_cli, tmp_path, s3, backend, world):
    needs_backend(backend)
    flags = ["--backend", backend, "--checkpoint-dir", ADDRESS, "--set", "keep_latest_k=2"]
    first = run_cli(arguments(tmp_path, [], *flags, "--epochs", "2", world=world), env=s3.env)
    assert first.returncode == 0, first.output
    steps = complete_checkpoints(s3.objects("mine/"))
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert {f"step-{step:08d}" for step in steps} == kept and len(kept) in (2, 3)  # the best may be older than both
    assert {name.split("/")[0] for name in s3.objects("mine/")} == set(steps.values())
    last = f"step-{max(steps):08d}"
    assert last in uploaded(tmp_path / "run")

    other = tmp_path / "other"
    (other / "fresh").mkdir(parents=True)
    (line,) = re.findall(r"^mkdir -p fresh\npython -m distributed\.cli train --script \S+ (.*)$", PAGE, re.M)
    argv = arguments(other, [], *line.split(), "--backend", backend, "--set", "keep_latest_k=2", world=world)
    del argv[argv.index("--run-dir") : argv.index("--run-dir") + 2]  # that of the line is left
    second = run_cli(argv, cwd=other, env=s3.env)

    assert second.returncode == 0, second.output
    assert f"resumed from {last}: step {max(steps)}, epoch 2" in second.stdout
    saved = max(complete_checkpoints(s3.objects("mine/")))
    assert saved == max(steps) * 3 // 2 and (other / "fresh" / "result.json").exists()
    if backend == "pytorch-ddp":
        commands = re.findall(r"^python -m distributed\.cli (checkpoint .*)$", PAGE, re.M)
        assert [command.split()[1] for command in commands] == ["list", "verify", "export"]
        for command in commands:
            words = command.replace("runs/mine", "mine").replace("step-00000046", f"step-{saved:08d}").split()
            done = run_cli(words, cwd=tmp_path, env=s3.env)
            shown = {"list": rf"^{saved} ", "verify": rf"step {saved}, .* all verified$", "export": ""}[words[1]]
            assert done.returncode == 0 and re.search(shown, done.stdout, re.M), done.output
        assert (tmp_path / "model.safetensors").exists()
    assert s3.env["AWS_SECRET_ACCESS_KEY"] not in first.output + second.output
    for file in (file for file in tmp_path.rglob("*") if file.is_file()):
        assert s3.env["AWS_SECRET_ACCESS_KEY"].encode() not in file.read_bytes(), file


def test_a_run_directory_at_an_address_continues_on_another_machine(run_cli, tmp_path, s3, clean):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    address = f"s3://{BUCKET}/runs/mine"

    def train(machine, *more):
        argv = arguments(tmp_path, [], *more)
        argv[argv.index("--run-dir") + 1] = address
        return run_cli(argv, cwd=machine, env=s3.env)

    first = train(here, "--max-steps", "10")
    assert first.returncode == 0, first.output
    assert f"copied to {address}" in first.stdout
    (run,) = (here / "runs").iterdir()
    copied = s3.objects("runs/mine/")
    for name in ("config.yaml", "result.json", "events.jsonl", "metrics.jsonl", "logs/rank-1.log"):
        assert copied[name] == (run / name).read_bytes(), name
    again = train(there)
    assert again.returncode == 2 and said_in(again).count("\n") == 1, again.output
    assert f"error: run_dir='{address}' is not empty: add --resume" in again.stderr

    second = train(there, "--resume")

    assert second.returncode == 0, second.output
    assert "resumed from step-00000010" in second.stdout
    assert events(there / "runs" / run.name)[: len(events(run))] == events(run)
    assert_same(tmp_path, clean, run=f"there/runs/{run.name}")
    assert s3.objects("runs/mine/")["metrics.jsonl"] == (there / "runs" / run.name / "metrics.jsonl").read_bytes()
    assert max(complete_checkpoints(s3.objects("runs/mine/checkpoints/"))) == STEPS
    third = train(here, "--resume")  # the first machine is behind the storage
    assert third.returncode == 0, third.output
    assert f"resumed from {LAST}" in third.stdout
    assert events(run)[: len(events(there / "runs" / run.name))] == events(there / "runs" / run.name)


@pytest.mark.cluster
def test_a_run_ends_although_the_storage_has_gone(start, tmp_path, s3, clean):
    """Training goes on, and the end says what is missing. A resume makes up for it."""

    commands = []

    def gone(number):
        commands.append(describe(run.alive()))
        s3.faults = [
            Fault(method, 503, "ServiceUnavailable", "Try later.") for method in ("PUT", "GET", "HEAD", "DELETE")
        ]

    s3.after_write = lambda number: gone(number) if number == 10 else None
    argv = [sys.executable, "-m", "distributed.cli", *arguments(tmp_path, [], "--checkpoint-dir", ADDRESS)]
    run = start(argv, env=s3.env, fresh=True)  # whose command line is not that of a process that was forked
    done = run.finish()
    assert "distributed" in commands[0]
    assert not any(s3.env[name] in commands[0] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    assert done.returncode == 1, done.output
    assert f"checkpoints could not be uploaded to {ADDRESS}: Try later." in done.stderr
    assert "run again with --resume to upload them" in done.stderr and "Traceback" not in done.output
    assert events(tmp_path / "run")[-1] == "worker_failed"
    assert_same(tmp_path, clean)

    s3.faults, s3.after_write = [], lambda number: None
    again = start([*argv[: argv.index("--")], "--resume", *argv[argv.index("--") :]], env=s3.env).finish()

    assert again.returncode == 0, again.output
    assert max(complete_checkpoints(s3.objects("mine/"))) == STEPS


def test_a_run_that_fails_leaves_no_upload_behind(start, tmp_path, s3):
    """The main process is killed while its uploads are behind. The launcher does the rest."""
    s3.delay_s = 0.1
    argv = arguments(tmp_path, [["step", 16, 0]], "--checkpoint-dir", ADDRESS, "--max-restarts", "0")
    done = start([sys.executable, "-m", "distributed.cli", *argv], env=s3.env).finish()
    assert done.returncode == 1 and "killed" in done.stderr, done.output
    assert uploaded(tmp_path / "run")[-1:] != ["step-00000015"], "the uploads were not behind"
    assert max(complete_checkpoints(s3.objects("mine/"))) == 15


@pytest.mark.parametrize(
    ("flags", "env", "fault", "words"),
    [
        (["--checkpoint-dir", "s3://nowhere/mine"], {}, None, "checkpoint_dir='s3://nowhere/mine' cannot be written: The specified bucket"),
        (["--run-dir", "s3://nowhere/mine"], {}, None, "run_dir='s3://nowhere/mine' cannot be written: The specified bucket does not exist"),
        (["--run-dir", ADDRESS], {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": "/nowhere"}, None, "Unable to locate credentials"),
        (["--checkpoint-dir", ADDRESS], {}, ("AccessDenied", "Access Denied"), f"checkpoint_dir={ADDRESS!r} cannot be written: Access Denied"),
        (["--checkpoint-dir", ADDRESS], {}, ("QuotaExceeded", "The quota is used up"), "The quota is used up: check the address"),
    ],
)  # fmt: skip
def test_storage_that_cannot_be_used_is_told_before_training(run_cli, tmp_path, s3, flags, env, fault, words):
    if fault is not None:
        s3.faults = [Fault("PUT", 403, *fault)]
    argv = arguments(tmp_path, [], *flags)
    if "--run-dir" in flags:  # given twice, the first is ours
        del argv[argv.index("--run-dir") : argv.index("--run-dir") + 2]
    done = run_cli(argv, env={**s3.env, **env}, cwd=tmp_path)
    assert done.returncode == 2, done.output
    assert words in said_in(done) and said_in(done).count("\n") == 1, done.output
    assert not list(tmp_path.glob("samples-*")), "training began"


@FULL
def test_storage_that_does_not_answer_ends_a_run_with_the_code_of_a_missing_resource(run_cli, tmp_path, s3):
    """After five attempts within 35 seconds."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    argv = arguments(tmp_path, [], "--checkpoint-dir", ADDRESS)
    done = run_cli(argv, env={**s3.env, "AWS_ENDPOINT_URL_S3": url}, cwd=tmp_path)
    assert done.returncode == 3 and said_in(done).count("\n") == 1, done.output
    assert f'cannot be written: Could not connect to the endpoint URL: "{url}/' in done.stderr


@pytest.mark.parametrize("option", ["--checkpoint-dir", "--run-dir"])
def test_a_wrong_address_is_refused_before_any_worker_starts(run_cli, tmp_path, option):
    argv = ["train", "--script", "train.py", option, "hdfs://host/mine"]
    (tmp_path / "train.py").touch()
    done = run_cli(argv, cwd=tmp_path, fresh=True)
    assert done.returncode == 2 and "has the unknown scheme 'hdfs': give s3://BUCKET/PATH" in done.stderr, done.output
    assert done.within(1.0) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=[FULL, pytest.mark.timeout(3600)])])
def test_a_run_killed_in_the_middle_of_uploads_resumes_from_a_verified_checkpoint(start, tmp_path, s3, clean, kills):
    """All processes get SIGKILL at a random write, before the object is stored or before the write is answered. The next attempt
    is on the same machine, or on one that has nothing. A run that gets to its end is compared, and the next one starts over."""
    draw = random.Random(kills)
    machine, struck, ended = tmp_path / "machine-0", 0, 0
    for number in range(1000):
        if not number or draw.random() < 0.5:
            machine = tmp_path / f"machine-{number}"
            (machine / "run").mkdir(parents=True)
        stored = complete_checkpoints(s3.objects("mine/"))  # asserts that whatever has a manifest is whole
        here = [int(path.name[5:]) for path in (machine / "run").glob("checkpoints/step-*")]
        argv = arguments(machine, [], "--checkpoint-dir", ADDRESS, "--resume", "--set", "keep_latest_k=2")
        is_last = struck >= kills
        s3.delay_s = 0.01
        command = attack(s3, start, argv, None if is_last else draw.randint(2, 25), draw.choice(["before", "after"]))
        expected = max([*stored, *here], default=0)
        # A checkpoint that was not uploaded yet is uploaded before the run says from where it goes on.
        if is_last or "global_batch_size" in command.output:
            shown = f"resumed from step-{expected:08d}" if expected else f"nothing to resume from in {ADDRESS}: "
            assert shown in command.output, command.output
        if command.process.returncode != 0:
            assert command.process.returncode == -signal.SIGKILL, command.output
            struck += 1
            continue
        ended += 1
        fetched = tmp_path / f"fetched-{number}"
        assert max(complete_checkpoints(s3.objects("mine/"))) == STEPS
        for name, content in s3.objects(f"mine/{complete_checkpoints(s3.objects('mine/'))[STEPS]}/").items():
            (fetched / name).parent.mkdir(parents=True, exist_ok=True)
            (fetched / name).write_bytes(content)
        assert digests(fetched) == digests(newest(clean / "run"))
        assert progress(fetched) == progress(newest(clean / "run"))
        if is_last:
            break
        s3.calm()
        shutil.rmtree(machine / "run")
        (machine / "run").mkdir()
    print(f"{struck} kills, {ended} runs to the end")
    assert struck == kills


def attack(s3, start, argv, at, moment):
    """Run a command until it ends, or kill all its processes at the write number `at`. Return the ended command."""
    running = []

    def strike(number):
        while number == at and (pids := running[0].alive()):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    s3.writes = 0
    s3.before_write = strike if moment == "before" else lambda number: None
    s3.after_write = strike if moment == "after" else lambda number: None
    running.append(start([sys.executable, "-m", "distributed.cli", *argv], env=s3.env))
    running[0].process.wait(120)
    s3.wait_for_clients()
    s3.before_write = s3.after_write = lambda number: None
    return running[0]
