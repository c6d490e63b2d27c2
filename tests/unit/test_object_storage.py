"""Addresses, requests to S3 as moto serves it on loopback, and the copies of checkpoints there. Loads no framework."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from distributed.backends.world import OneProcess
from distributed.checkpoints import manifest, mirror
from distributed.checkpoints import objects as storage
from distributed.checkpoints.agreement import described, rebuilt
from distributed.checkpoints.manifest import list_checkpoints
from distributed.checkpoints.mirror import UPLOAD_FAILED, fetch_newest, stored_checkpoints
from distributed.checkpoints.objects import TRIES, Objects, StorageError
from distributed.checkpoints.store import CheckpointStore
from distributed.checkpoints.tensor_file import RawTensor, read_raw, write_tensors
from distributed.checkpoints.verifying import verify
from distributed.cli.checkpoint import app
from distributed.config import addresses
from distributed.config.addresses import address_in, check_library, is_address, refuse_address
from distributed.config.plan import ProcessPlan
from distributed.config.settings import DistributedConfig
from distributed.errors import CheckpointError, ConfigError, ResourceError, TrainingError
from distributed.launching.forkserver import launch
from distributed.runs import remote as remote_run
from distributed.runs.directory import RunDirectory
from distributed.runs.remote import RemoteRun, directory_of, upload_rest
from distributed.state import TrainState, WorkerContext
from distributed.training.files import TrainerFiles
from tests.object_storage import BUCKET, Fault, complete_checkpoints, s3_server, silent_server

pytestmark = pytest.mark.timeout(120)
pytest.importorskip("s3fs", reason="object storage needs s3fs")
ADDRESS = f"s3://{BUCKET}/mine"


# ------------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("s3://bucket", "s3://bucket"),
        ("S3://bucket/a/b/", "s3://bucket/a/b"),
        ("gs://bucket/a", "gs://bucket/a"),
        ("file:///tmp/a", "file:///tmp/a"),
    ],
)
def test_an_address_is_accepted(given, address):
    assert is_address(given)
    assert DistributedConfig(checkpoint_dir=given).checkpoint_dir == address


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("hdfs://host/a", "unknown scheme 'hdfs': give s3://BUCKET/PATH"),
        ("gcs://bucket/a", "did you mean 'gs'?"),
        ("s3:///a", "is not an address"),
        ("s3://", "is not an address"),
        ("file://a", "is not an address"),
        ("s3://bucket//a", "is not an address"),
        ("s3://bucket/../a", "is not an address"),
        ("s3://bucket/a*", "contains '*'"),
        ("s3://bucket/a?X-Amz-Signature=1", "contains '?'"),
        (Path("s3://bucket/a"), "pass the address as a str"),
    ],
)
def test_a_wrong_address_is_refused(given, why):
    with pytest.raises(ConfigError) as raised:
        DistributedConfig(checkpoint_dir=given)
    assert why in str(raised.value) and "checkpoint_dir" in str(raised.value) and "\n" not in str(raised.value)


def test_credentials_in_an_address_are_refused_and_not_shown():
    with pytest.raises(ConfigError, match="pass the credentials in the environment") as raised:
        DistributedConfig(checkpoint_dir="s3://AKIAKEY:hush@bucket/a")
    assert "hush" not in str(raised.value) and "AKIAKEY" not in str(raised.value)


@pytest.mark.parametrize(
    "given",
    ["s3://AKIAKEY:hu/sh@bucket/a", "s3:///AKIAKEY:hu/sh@bucket/a", "s3://bucket/a?X-Amz-Signature=AKIAKEYhu/sh"],
)
def test_a_secret_with_a_slash_is_not_shown_either(given):
    for call in (
        lambda: DistributedConfig(checkpoint_dir=given),
        lambda: refuse_address(given, "'distributed status'"),
        lambda: refuse_address(Path(given), "'distributed status'"),
    ):
        with pytest.raises(ConfigError) as raised:
            call()
        assert not {part for part in ("AKIAKEY", "hu/sh", "sh@") if part in str(raised.value)}, raised.value


def test_a_path_is_no_address():
    assert not any(map(is_address, ["runs/a", "/tmp/s3:/a", "a b", ".", None, Path("a")]))
    assert address_in(Path("s3://bucket/a")) == "s3://bucket/a"
    assert address_in(Path("file:///tmp/a")) == "file:///tmp/a"
    assert address_in(Path("runs/a")) is None


def test_a_missing_library_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(addresses, "is_installed", lambda name: name != "gcsfs")
    check_library("checkpoint_dir", "s3://bucket/a")
    check_library("checkpoint_dir", "runs/a")
    with pytest.raises(ResourceError, match=r"needs gcsfs.*pip install 'distributed-trainer\[cloud\]'"):
        check_library("checkpoint_dir", "gs://bucket/a")


def test_two_addresses_never_share_a_directory():
    names = {directory_of(each) for each in ("s3://a/run", "s3://b/run", "s3://a/x/run")}
    assert len(names) == 3 and all(str(name).startswith("runs/run-") for name in names)
    assert directory_of("s3://a/run/") == directory_of("s3://a/run")
    assert directory_of("here/run") == "here/run"


# ------------------------------------------------------------------ requests


@pytest.fixture(scope="module")
def server():
    with s3_server() as running:
        yield running


@pytest.fixture
def s3(server, monkeypatch):
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage, "_FIRST_PAUSE_S", 0.01)
    server.calm()
    return server


@pytest.fixture(scope="module")
def connected(server):
    """Return what connects to the server, once for the module: that takes half a second."""
    found: dict[str, Any] = {}
    real = Objects._connect

    def connect(self):
        if "system" not in found:
            found["system"] = (real(self), self._errors)
        self._system, self._errors = found["system"]
        return self._system

    return connect


@pytest.fixture
def quick(s3, connected, monkeypatch):
    """The server, with one connection for all stores."""
    monkeypatch.setattr(Objects, "_connect", connected)
    return s3


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    # The emulator of Google's storage loses ends of lines in what it gets in one part.
    path.write_bytes(os.urandom(5000).replace(b"\r", b"-").replace(b"\n", b"-"))
    return path


def test_only_files_below_the_address_are_listed(s3, file):
    Objects("s3://bucket/mine-2").put(file, "a")
    here = Objects(ADDRESS)
    here.put(file, "x/a")
    here.put(file, "b")
    assert here.sizes() == {"x/a": 5000, "b": 5000}
    assert here.sizes("x") == {"x/a": 5000}
    assert here.read("b") == file.read_bytes()
    here.remove(["b", "b"])
    assert list(here.sizes()) == ["x/a"]


@pytest.mark.parametrize("method", ["PUT", "GET", "HEAD"])
def test_a_server_that_fails_for_a_while_is_asked_again(s3, file, method):
    s3.faults = [Fault(method, 500, "InternalError", "We encountered an internal error.", times=TRIES - 1)]
    here = Objects(ADDRESS)
    here.put(file, "a")
    assert here.read("a") == file.read_bytes()
    assert s3.faults[0].times == 0


def test_the_attempts_are_limited(s3, file):
    s3.faults = [Fault("PUT", 503, "SlowDown", "Please reduce your request rate.")]
    with pytest.raises(StorageError, match=rf"Please reduce your request rate. \(after {TRIES} attempts\)"):
        Objects(ADDRESS).put(file, "a")
    assert len(s3.requests) == TRIES


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "AccessDenied", "Access Denied"),
        (403, "QuotaExceeded", "The bucket quota is exceeded"),
        (507, "XMinioStorageFull", "Storage backend has reached its minimum free drive threshold"),
        (403, "InvalidAccessKeyId", "The access key ID does not exist in our records"),
        (404, "NoSuchBucket", "The specified bucket does not exist"),
    ],
)
def test_a_refusal_is_told_at_once_in_the_words_of_the_server(s3, status, code, words):
    s3.faults = [Fault("PUT", status, code, words)]
    with pytest.raises(ConfigError) as raised:
        Objects(ADDRESS).probe("checkpoint_dir")
    text = str(raised.value)
    assert text.startswith(f"checkpoint_dir='{ADDRESS}' cannot be written: ") and words in text and "\n" not in text
    assert len(s3.requests) == 1


def test_storage_that_does_not_answer_may_be_tried_again_later(s3, tmp_path, monkeypatch, capsys):
    """The exit code is not that of a wrong setting, with which a job in Kubernetes ends for good."""
    monkeypatch.chdir(tmp_path)
    s3.faults = [Fault("PUT", 503, "ServiceUnavailable", "Try later.")]
    with pytest.raises(ResourceError, match="cannot be written: Try later"):
        Objects(ADDRESS).probe("checkpoint_dir")
    assert remote_run._main(json.dumps({"run_dir": ADDRESS, "resume": True})) == ResourceError.exit_code
    s3.faults = [Fault("PUT", 403, "AccessDenied", "Access Denied")]
    assert remote_run._main(json.dumps({"run_dir": ADDRESS, "resume": True})) == ConfigError.exit_code
    s3.faults = [Fault("GET", 503, "ServiceUnavailable", "Try later.")]
    with pytest.raises(ResourceError, match="cannot be read: Try later"):
        fetch_newest(ADDRESS, tmp_path / "into")


def test_the_other_ranks_know_that_the_storage_does_not_answer():
    error = rebuilt(described(ResourceError("s3://bucket/mine cannot be read: Try later.")), 0)
    assert type(error) is ResourceError


@pytest.mark.parametrize(
    ("words", "is_final"),
    [("Unable to locate credentials", True), ("Error when retrieving credentials from iam-role: timed out", False)],
)
def test_credentials_that_could_not_be_fetched_may_come(words, is_final):
    assert bool(storage._FINAL.search(words)) == is_final


def test_storage_from_which_nothing_can_be_removed_is_refused(s3):
    s3.faults = [Fault("DELETE", 403, "AccessDenied", "Access Denied")]
    with pytest.raises(ConfigError, match="cannot be removed from: Access Denied"):
        Objects(ADDRESS).probe("checkpoint_dir")


def test_missing_credentials_are_told(s3, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="Unable to locate credentials"):
        Objects(ADDRESS).probe("checkpoint_dir")


def test_an_unreachable_address_is_told(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    with pytest.raises(ResourceError, match="Could not connect to the endpoint URL") as raised:
        Objects(ADDRESS).probe("checkpoint_dir")
    assert "probe" not in str(raised.value) and "quota" not in str(raised.value)
    assert "hush" not in storage._words(OSError("no answer from http://someone:hush@127.0.0.1:9/x"))


def test_a_server_that_never_answers_is_given_up_soon_and_waited_for_audibly(s3, monkeypatch):
    """A request that uploads waits for "100 Continue", and the libraries set no time limit for that."""
    monkeypatch.setattr(storage, "_PATIENT_S", 0.2)
    monkeypatch.setattr(storage, "_PROBE_S", 2.0)
    said: list[str] = []
    with silent_server() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        began = time.monotonic()
        with pytest.raises(
            ResourceError, match="cannot be written: the server does not answer: check the address, the network"
        ):
            Objects(ADDRESS).probe("checkpoint_dir", said.append)
        assert time.monotonic() - began < 10
    assert said == [f"waiting for an answer from {ADDRESS} (at most 2 s)"]


def test_an_upload_to_a_server_that_never_answers_is_tried_again_and_ends(s3, file, monkeypatch):
    monkeypatch.setattr(storage, "_READ_S", 1.0)
    monkeypatch.setattr(storage, "TRIES", 2)
    with silent_server() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        with pytest.raises(StorageError, match=r"the server does not answer \(after 2 attempts\)"):
            Objects(ADDRESS).put(file, "a")


def test_an_unreachable_google_cloud_storage_without_credentials_is_told_in_one_line(monkeypatch, tmp_path, capfd):
    pytest.importorskip("gcsfs")
    monkeypatch.setattr(storage, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    for name in ("gcsfs", "google.auth"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    began = time.monotonic()
    with pytest.raises(
        ResourceError, match=r"; no credentials of Google Cloud were found \(after 5 attempts\): check"
    ) as raised:
        Objects(f"gs://{BUCKET}/there").probe("checkpoint_dir")
    assert time.monotonic() - began < 25 and "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


def test_a_message_of_the_server_that_ends_a_sentence_is_not_ended_twice(s3):
    s3.faults = [Fault("PUT", 403, "InvalidAccessKeyId", "The access key ID does not exist in our records.")]
    with pytest.raises(ConfigError, match="in our records: check the address, the credentials"):
        Objects(ADDRESS).probe("checkpoint_dir")


def test_content_that_changes_on_its_way_is_sent_again(s3, file, monkeypatch):
    """Size and digest of the storage are right or wrong, and where it has no digest of the content, it is read back."""
    reads = []
    real = storage._is_digest_of

    def digest_of(info, source):
        reads.append("digest")
        if len(reads) == 1:
            s3.put("mine/a", b"x" * 5000)  # as if the first upload had arrived like this
            return real({**info, "ETag": '"00000000000000000000000000000000-kms"'}, source)
        return real(info, source)

    monkeypatch.setattr(storage, "_is_digest_of", digest_of)
    Objects(ADDRESS).put(file, "a")
    assert s3.objects("mine/") == {"a": file.read_bytes()}
    assert len(reads) == 2
    assert [each.split()[0] for each in s3.requests].count("GET") == 1  # the first one was read back


def test_a_large_file_is_verified_without_reading_it_back(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_PART_BYTES", 5 << 20)
    path = tmp_path / "large"
    path.write_bytes(os.urandom(11 << 20))
    Objects(ADDRESS).put(path, "large")
    assert sum(each.startswith("PUT") for each in s3.requests) == 3  # parts
    assert not [each for each in s3.requests if each.startswith("GET")]
    assert s3.objects("mine/")["large"] == path.read_bytes()


def test_files_and_google_cloud_storage_work_alike(tmp_path, file, monkeypatch):
    gcsfs = pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    google = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    google.start()
    try:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{google._api._httpd.server_port}")
        monkeypatch.setattr(gcsfs.GCSFileSystem, "default_location", None, raising=False)
        for address in (f"file://{tmp_path}/there", f"gs://{BUCKET}/there"):
            here = Objects(address)
            here.probe("checkpoint_dir")
            here.put(file, "x/a")
            assert here.sizes() == {"x/a": 5000}
            here.get("x/a", tmp_path / "back")
            assert (tmp_path / "back").read_bytes() == file.read_bytes()
            with pytest.raises(StorageError) as raised:
                here.read("nothing")
            assert raised.value.is_missing
            here.remove(["x/a"])
            assert here.sizes() == {}
    finally:
        google.stop()


# ------------------------------------------------------------------ checkpoints


class OneFile:
    """The parts of a backend that a save needs. The weights are `content`."""

    plan = ProcessPlan(1, 1, "cpu", "single")
    config = DistributedConfig()
    world = OneProcess(WorkerContext(0, 1, 0, 1, 0, "cpu"))
    content = b"weights"
    loaded = b""

    def save(self, directory: Path) -> dict[str, Any]:
        (directory / "model").mkdir()
        content = self.content
        tensors = [RawTensor("weight", "U8", (len(content),), lambda: content)]
        write_tensors(directory / "model" / "model.safetensors", tensors, {})
        return {}

    def load(self, directory: Path, state: Any) -> Callable[[], None]:
        (tensor,), _ = read_raw(directory / "model" / "model.safetensors")

        def finish() -> None:
            self.loaded = bytes(tensor.read())

        return finish


class Machine:
    """A machine with a store whose checkpoints are copied to `ADDRESS`. `said` has its messages."""

    def __init__(
        self, path: Path, keep_latest_k: int = 2, *, keep_best: bool = False, after: Any = lambda: None, address: str = ADDRESS,
        is_restart: bool = False,
    ) -> None:  # fmt: skip
        self.said: list[str] = []
        self.uploads: list[str] = []
        self.backend = OneFile()
        self.store = CheckpointStore(
            path / "checkpoints", self.backend, keep_latest_k=keep_latest_k, keep_best=keep_best, monitor="val_loss", monitor_mode="min",
            context=WorkerContext(0, 1, 0, 1, 0, "cpu"), on_event=lambda event: self.said.append(event["text"]),
            objects=Objects(address), on_upload=lambda upload: self.uploads.append(upload.checkpoint), copy_run=after,
            is_restart=is_restart,
        )  # fmt: skip

    def save(self, step: int, content: bytes = b"weights", value: float | None = None, *, wait: bool = True) -> None:
        self.backend.content = content
        assert self.store.save(TrainState(step=step), {}, value) is not None
        if wait:
            self.store.settle()

    def resume(self) -> bytes:
        """Return the weights of the newest checkpoint."""
        path = self.store.find()
        assert path is not None
        self.store.resume(path)
        return self.backend.loaded

    @property
    def steps(self) -> list[int]:
        return [info.step for info in list_checkpoints(self.store.directory)]


def test_a_checkpoint_that_is_damaged_is_never_uploaded_nor_are_others_removed_for_it(tmp_path):
    """The run that saved it has ended before its upload. Its large tensor is verified when it is loaded, some time after `find`."""
    address, there = f"file://{tmp_path}/there", tmp_path / "there"
    Machine(tmp_path, 1, address=address).save(1, b"1" * (2 << 20))
    Machine(tmp_path, 2, address=f"file://{tmp_path}/elsewhere").save(2, b"2" * (2 << 20))
    file = tmp_path / "checkpoints" / "step-00000002" / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[1 << 20] ^= 1
    file.write_bytes(content)
    again = Machine(tmp_path, 1, address=address)
    path = again.store.find()
    time.sleep(1.0)  # as the model is prepared now
    assert [each.name for each in there.iterdir() if each.is_dir()] == ["step-00000001"]
    assert path.name == "step-00000002" and again.store.resume(path)[1].step == 1
    assert again.backend.loaded[:1] == b"1"
    again.save(3, b"3" * (2 << 20))
    assert sorted(each.name for each in there.iterdir() if each.is_dir()) == ["step-00000003"]
    assert len(again.said) == 1 and "step 2 is set aside" in again.said[0]


def stored(s3):
    return sorted(complete_checkpoints(s3.objects("mine/")))


def test_retention_holds_in_the_storage_too(quick, tmp_path):
    machine = Machine(tmp_path, keep_best=True)
    for step, value in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5), (5, 2.6)):
        machine.save(step, value=value)
    assert stored(quick) == machine.steps == [2, 4, 5]
    assert {name.split("/")[0] for name in quick.objects("mine/")} == {f"step-{step:08d}" for step in (2, 4, 5)}
    other = Machine(tmp_path / "other", keep_best=True)
    assert other.resume() == b"weights"
    other.save(6, value=2.7)
    assert stored(quick) == [2, 5, 6]  # the machine never had the others
    assert machine.said == other.said == []


def test_a_machine_without_files_resumes_from_the_storage(quick, tmp_path):
    Machine(tmp_path / "a").save(7, b"of step 7")
    other = Machine(tmp_path / "b")
    assert other.resume() == b"of step 7"
    assert other.steps == [7]
    verify(other.store.directory / "step-00000007")
    other.save(8, b"of step 8")
    assert Machine(tmp_path / "a").resume() == b"of step 8"  # the first machine is behind now


def test_the_files_of_the_machine_are_used_if_they_are_newer(quick, tmp_path):
    machine = Machine(tmp_path)
    machine.save(1, b"old")
    quick.faults = [Fault("PUT", 403, "AccessDenied", "Access Denied")]
    with pytest.raises(
        TrainingError, match=r"could not be uploaded to s3://bucket/mine: Access Denied; they are in .*--resume"
    ):
        machine.save(2, b"new")
    assert stored(quick) == [1]
    quick.faults = []
    again = Machine(tmp_path)
    assert again.resume() == b"new"
    again.store.settle()  # the resume uploads what was missing
    assert stored(quick) == [1, 2]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "manifest"])
def test_a_damaged_checkpoint_is_passed_over(quick, tmp_path, damage):
    machine = Machine(tmp_path / "a")
    machine.save(1, b"sound")
    machine.save(2, b"damaged")
    name = "mine/step-00000002/" + ("manifest.json" if damage == "manifest" else "model/model.safetensors")
    content = quick.objects()[name]
    if damage == "missing":
        quick.remove(name)
    else:
        quick.put(name, content[:-1] if damage == "truncated" else content[:-3] + b"###")
    other = Machine(tmp_path / "b")
    assert other.resume() == b"sound"
    assert len(other.said) == 1 and "step-00000002" in other.said[0]
    other.save(2, b"anew")  # replaces the damaged one
    assert Machine(tmp_path / "c").resume() == b"anew"
    if damage == "manifest":  # it is never removed
        quick.remove(name)
    assert stored(quick) == [1, 2]


def test_only_damaged_checkpoints_are_an_error(quick, tmp_path):
    Machine(tmp_path / "a").save(1)
    quick.put("mine/step-00000001/model/model.safetensors", b"###")
    with pytest.raises(CheckpointError, match=r"s3://bucket/mine holds only damaged checkpoints \(step-00000001\)"):
        Machine(tmp_path / "b").store.find()


def test_an_upload_that_was_cut_off_is_no_checkpoint(quick, tmp_path):
    Machine(tmp_path / "a").save(1, b"whole")
    quick.put("mine/step-00000002/model/model.safetensors", b"###")
    quick.put("mine/step-00000002/rng/rank-7.safetensors", b"###")  # of more processes than the next attempt has
    other = Machine(tmp_path / "b")
    assert other.resume() == b"whole"
    other.save(2, b"later")
    assert Machine(tmp_path / "c").resume() == b"later"
    assert stored(quick) == [1, 2]
    quick.put("mine/step-00000003/model/model.safetensors", b"###")
    other.save(4)
    assert not quick.objects("mine/step-00000003/")


def test_training_does_not_wait_for_an_upload(quick, tmp_path):
    """While step 1 is being uploaded, steps 2 to 5 are saved. Step 1 stays until it has arrived, and only what retention keeps of the
    others is uploaded, the newest first."""
    go = threading.Event()
    quick.before_write = lambda number: go.wait(30)
    machine = Machine(tmp_path, keep_latest_k=1)
    machine.save(1, wait=False)
    while not quick.writes:
        time.sleep(0.01)
    for step in (2, 3, 4, 5):
        machine.save(step, wait=False)
    assert machine.steps == [1, 5] and not machine.uploads
    go.set()
    machine.store.settle()
    assert machine.uploads == ["step-00000001", "step-00000005"]
    assert stored(quick) == machine.steps == [5]


def test_a_wait_for_the_last_upload_is_told_with_its_size(quick, tmp_path, monkeypatch):
    machine = Machine(tmp_path)
    machine.save(1)
    assert machine.said == []
    monkeypatch.setattr(mirror, "_PATIENT_S", 0.1)
    go = threading.Event()
    quick.before_write = lambda number: go.wait(30)
    machine.save(2, wait=False)
    threading.Timer(0.5, go.set).start()
    machine.store.settle()
    (said,) = machine.said
    assert re.fullmatch(rf"waiting for the upload of step-00000002 \(\d+ \w+\) to {ADDRESS}", said)


def test_a_step_that_is_saved_again_replaces_its_upload(quick, tmp_path):
    """The old one stays in the storage until the new one is complete, also if the files change during the upload."""
    machine = Machine(tmp_path, keep_latest_k=1)
    machine.save(1, b"first")
    seen = []
    quick.after_write = lambda number: seen.append(stored(quick))
    machine.save(1, b"again", value=1.0)
    assert seen and all(steps == [1] for steps in seen)
    assert Machine(tmp_path / "b").resume() == b"again"
    go = threading.Event()
    quick.after_write, quick.before_write, quick.writes = (
        (lambda number: None),
        (lambda number: number == 1 and go.wait(30)),
        0,
    )
    machine.save(1, b"in between", value=2.0, wait=False)
    while not quick.writes:
        time.sleep(0.01)
    machine.save(1, b"at last", value=3.0, wait=False)
    go.set()
    machine.store.settle()
    assert Machine(tmp_path / "c").resume() == b"at last"
    assert len({name.split("/")[0] for name in quick.objects("mine/")}) == 1
    assert machine.said == []


def test_an_outage_costs_one_warning_and_is_made_up_for(quick, tmp_path):
    machine = Machine(tmp_path, keep_latest_k=5)
    quick.faults = [Fault("PUT", 503, "ServiceUnavailable", "Try later.")]
    for step in (1, 2, 3):
        machine.save(step, wait=False)
        while machine.store._mirror._tried < step:
            time.sleep(0.01)
    assert len(machine.said) == 1 and "Try later." in machine.said[0] and "training continues" in machine.said[0]
    quick.faults = []
    machine.save(4)
    assert stored(quick) == [1, 2, 3, 4]


def test_a_restart_goes_on_without_the_storage(quick, tmp_path):
    machine = Machine(tmp_path)
    machine.save(1, b"here")
    quick.faults = [Fault("GET", 503, "ServiceUnavailable", "Try later.")]
    again = Machine(tmp_path, is_restart=True)
    assert again.resume() == b"here"
    assert "cannot be read: Try later." in again.said[0]
    for first in (Machine(tmp_path), Machine(tmp_path / "b"), Machine(tmp_path / "b", is_restart=True)):
        with pytest.raises(ResourceError, match=r"cannot be read: Try later\."):
            first.store.find()


def test_a_download_that_breaks_does_not_lead_to_an_older_checkpoint(quick, tmp_path):
    """Another machine has gone on since. Only a restart may continue from what this machine has."""
    Machine(tmp_path / "a").save(1, b"old")
    other = Machine(tmp_path / "b")
    other.resume()
    other.save(2, b"new")
    quick.faults = [Fault("GET", 503, "ServiceUnavailable", "Try later.", path="model.safetensors")]
    with pytest.raises(ResourceError, match=r"s3://bucket/mine cannot be read: Try later\."):
        Machine(tmp_path / "a").store.find()
    assert Machine(tmp_path / "a", is_restart=True).resume() == b"old"
    quick.faults = []
    assert Machine(tmp_path / "a").resume() == b"new"


def test_a_checkpoint_is_never_newer_than_the_metrics_beside_it(tmp_path):
    """A machine that is lost after the upload of a checkpoint leaves the metrics up to it."""
    address, there = f"file://{tmp_path}/there", tmp_path / "there" / "step-00000001"
    seen: list[list[bool]] = []

    def copy_run() -> None:
        seen.append([(there / name).exists() for name in ("state.json", "manifest.json")])

    Machine(tmp_path / "a", address=address, after=copy_run).save(1)
    assert seen[0] == [True, False] and seen[-1] == [True, True]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_the_thread_does_not_hang_the_run(quick, tmp_path):
    errors: list[BaseException] = []

    def after():
        if errors:
            raise errors.pop()

    machine = Machine(tmp_path, after=after)
    machine.save(1)
    errors.append(ZeroDivisionError())
    with pytest.raises(TrainingError, match="ended with an error"):
        machine.save(2)
    machine.save(3)
    assert stored(quick) == [2, 3]


def test_a_run_starts_from_a_checkpoint_at_an_address(quick, tmp_path):
    Machine(tmp_path / "a").save(3, b"of step 3")
    fresh = Machine(tmp_path / "b")
    path = fresh.store.open(ADDRESS)
    assert fresh.store.resume(path)[1].step == 3
    assert fresh.backend.loaded == b"of step 3"
    assert path.exists() and fresh.steps == []
    fresh.store.close()
    assert not path.exists()
    assert fetch_newest(f"{ADDRESS}/step-00000003", tmp_path / "c").name == "step-00000003"
    with pytest.raises(CheckpointError, match="s3://bucket/nothing holds no checkpoint"):
        fresh.store.open("s3://bucket/nothing")


def test_commands_read_checkpoints_at_an_address(quick, tmp_path):
    Machine(tmp_path / "a").save(3, b"of step 3")
    for command in (["list", ADDRESS], ["verify", ADDRESS], ["export", ADDRESS, str(tmp_path / "out.safetensors")]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    assert bytes(read_raw(tmp_path / "out.safetensors")[0][0].read()) == b"of step 3"
    quick.put("mine/step-00000003/state.json", b"{}")
    assert "state.json" in CliRunner().invoke(app, ["list", ADDRESS]).output
    assert CliRunner().invoke(app, ["verify", ADDRESS]).exit_code == 1


def test_a_command_fails_otherwise_if_the_storage_cannot_be_read_than_if_a_checkpoint_is_damaged(quick):
    quick.faults = [Fault("GET", 403, "AccessDenied", "Access Denied")]
    for command in ("list", "verify"):
        done = CliRunner().invoke(app, [command, ADDRESS])
        assert isinstance(done.exception, ConfigError), done.output
        assert str(done.exception) == f"{ADDRESS} cannot be read: Access Denied"


def damage_manifest(folder):
    (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:-3] + b"###")


def test_a_checkpoint_whose_manifest_is_damaged_is_listed_and_never_removed(tmp_path):
    address, there = f"file://{tmp_path}/there", tmp_path / "there"
    machine = Machine(tmp_path / "a", address=address)
    machine.save(1, b"one")
    machine.save(2, b"two")
    damage_manifest(there / "step-00000002")
    infos = stored_checkpoints(Objects(address))
    assert [(info.step, bool(info.problem)) for info in infos] == [(1, False), (2, True)]
    listed = CliRunner().invoke(app, ["list", address]).output
    assert "step-00000002: manifest.json does not have the content that was saved" in listed
    other = Machine(tmp_path / "b", 1, address=address)
    assert other.resume() == b"one"
    assert len(other.said) == 1 and "step-00000002 is damaged" in other.said[0]
    for step in (2, 3):
        other.save(step)
    assert {path.name for path in there.iterdir()} == {"step-00000002", "step-00000003"}
    assert other.store.stored_elsewhere()
    damage_manifest(there / "step-00000003")
    with pytest.raises(CheckpointError, match="holds only damaged checkpoints"):
        Machine(tmp_path / "c", address=address).store.find()


def test_a_checkpoint_of_a_later_version_is_an_error_and_stays(tmp_path, monkeypatch):
    address, there = f"file://{tmp_path}/there", tmp_path / "there"
    machine = Machine(tmp_path / "a", address=address)
    machine.save(1)
    with monkeypatch.context() as later:
        later.setattr(manifest, "FORMAT", 2)
        machine.save(2)
    for act in (
        lambda: Machine(tmp_path / "b", address=address).store.find(),
        lambda: Machine(tmp_path / "b", address=address).store.stored_elsewhere(),
        lambda: fetch_newest(address, tmp_path / "into"),
    ):
        with pytest.raises(CheckpointError, match="has format 2, this version reads 1: upgrade"):
            act()
    with pytest.raises(TrainingError, match="has format 2"):
        Machine(tmp_path / "c", 1, address=address).save(3)
    assert {path.name for path in there.iterdir()} == {"step-00000001", "step-00000002"}


@pytest.mark.parametrize("damage", ["manifest", "size"])
def test_an_address_never_means_an_older_checkpoint_than_the_newest(tmp_path, damage):
    address, there = f"file://{tmp_path}/there", tmp_path / "there"
    machine = Machine(tmp_path / "a", address=address)
    machine.save(1)
    machine.save(2)
    if damage == "manifest":
        damage_manifest(there / "step-00000002")
    else:
        (there / "step-00000002" / "state.json").write_bytes(b"{")
    with pytest.raises(CheckpointError, match=rf"step-00000002: .*; another checkpoint.* is {address}/step-00000001$"):
        fetch_newest(address, tmp_path / "into")
    for command in (["verify", address], ["export", address, str(tmp_path / "out.safetensors")]):
        assert CliRunner().invoke(app, command).exit_code == 1
    assert not (tmp_path / "out.safetensors").exists()
    assert fetch_newest(f"{address}/step-00000001", tmp_path / "into").name == "step-00000001"


def test_a_damaged_checkpoint_is_uploaded_again_and_does_not_displace_a_sound_one(tmp_path):
    """The sizes of one are wrong, the content of another, which only a download finds out."""
    address, there = f"file://{tmp_path}/there", tmp_path / "there"
    machine = Machine(tmp_path / "a", address=address)
    machine.save(1, b"one")
    machine.save(2, b"two")
    (there / "step-00000002" / "state.json").unlink()
    again = Machine(tmp_path / "a", address=address)
    assert again.resume() == b"two"
    again.store.settle()
    assert again.uploads == ["step-00000002"]
    shutil.rmtree(tmp_path / "a")
    assert Machine(tmp_path / "b", address=address).resume() == b"two"

    (newest,) = there.glob("step-00000002*")
    weights = newest / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3] + b"###")
    other = Machine(tmp_path / "c", address=address)
    assert other.resume() == b"one"
    other.save(3, b"three")
    assert {info.step for info in stored_checkpoints(Objects(address))} >= {1, 3}


def test_a_file_of_a_mounted_file_system_appears_whole(tmp_path, file, monkeypatch):
    """The process ends in the middle of a write. The manifest that was there stays."""
    here = Objects(f"file://{tmp_path}/there")
    here.write("manifest.json", b"whole")
    here.put(file, "events.jsonl")

    def killed(*_):
        raise KeyboardInterrupt

    real = here._connect()
    monkeypatch.setattr(real, "cat_file", killed)
    monkeypatch.setattr(real, "info", killed)
    with pytest.raises(KeyboardInterrupt):
        here.write("manifest.json", b"half")
    with pytest.raises(KeyboardInterrupt):
        here.put(tmp_path / "file", "events.jsonl")
    assert (tmp_path / "there" / "manifest.json").read_bytes() == b"whole"
    assert (tmp_path / "there" / "events.jsonl").read_bytes() == file.read_bytes()


# ------------------------------------------------------------------ run directories


def test_a_run_that_is_refused_removes_nothing_of_the_run_that_is_there(tmp_path):
    address = f"file://{tmp_path}/there"
    machine = Machine(tmp_path / "a", address=address)
    machine.save(1)
    machine.save(2)
    run, fresh = RunDirectory(tmp_path / "b"), Machine(tmp_path / "b", 1, address=address)
    run.path.mkdir()
    files: Any = SimpleNamespace(_restart_count=0, wants_resume=lambda merged: False)
    with pytest.raises(ConfigError, match="holds checkpoints of an earlier run"):
        TrainerFiles._claim_objects(files, Objects(address), fresh.store, files, run)
    assert upload_rest(run.path) == "" and not (run.path / "remote.json").exists()
    assert [info.step for info in stored_checkpoints(Objects(address))] == [1, 2]

    files.wants_resume = lambda merged: True
    TrainerFiles._claim_objects(files, Objects(address), fresh.store, files, run)
    assert upload_rest(run.path) == ""  # the run has failed before its first save
    assert [info.step for info in stored_checkpoints(Objects(address))] == [1, 2]


def test_a_failure_of_an_earlier_launch_does_not_keep_uploads_back(tmp_path):
    """The earlier one failed because of an upload. This one failed otherwise, so what is missing is uploaded."""
    address, run = f"file://{tmp_path}/there", RunDirectory(tmp_path / "run")
    machine = Machine(run.path, address=address)
    machine.store.save(TrainState(step=1), {}, None)
    machine.store.settle()
    remote_run.record_checkpoints(run.path, address, keep_latest_k=2, keep_best=False)
    shutil.rmtree(tmp_path / "there")
    run.event("worker_failed", cause=f"{UPLOAD_FAILED} {address}: Try later.")
    begin = run.events_size()
    run.event("worker_failed", cause="rank 0 was killed by SIGKILL")
    request: Any = SimpleNamespace(launcher=__name__, run_dir=str(run.path), node_rank=0)
    run.events.write_bytes(run.events.read_bytes()[:begin])
    assert launch(request) == 1
    assert [info.step for info in stored_checkpoints(Objects(address))] == [1]


def serve(request: Any) -> int:
    """Fail as a launcher does that has written no cause."""
    return 1


def test_a_download_that_is_cut_off_is_repeated(tmp_path, monkeypatch):
    address, there = f"file://{tmp_path}/there", tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("config.yaml", "events.jsonl", "metrics.jsonl", "result.json", ".events.jsonl.part"):
        (there / name).write_text(f"{name}\n")
    real, here = remote_run._download, Path(str(directory_of(address)))

    def cut_off(objects: Objects, name: str, directory: Path) -> None:
        if name == "metrics.jsonl":
            raise StorageError("the connection was lost")
        real(objects, name, directory)

    monkeypatch.setattr(remote_run, "_download", cut_off)
    with pytest.raises(StorageError):
        remote_run._take(address, True)
    monkeypatch.setattr(remote_run, "_download", real)
    remote_run._take(address, True)
    assert {path.name for path in here.iterdir()} == {
        "config.yaml", "events.jsonl", "metrics.jsonl", "result.json", "remote.json",
    }  # fmt: skip


def test_the_journal_is_copied_last(quick, tmp_path):
    for name in ("config.yaml", "events.jsonl", "metrics.jsonl", "result.json"):
        (tmp_path / name).write_text(name)
    quick.requests.clear()
    RemoteRun(tmp_path, ADDRESS).push()
    sent = [each.rpartition("/")[2] for each in quick.requests if each.startswith("PUT")]
    assert sorted(sent) == sorted(["config.yaml", "events.jsonl", "metrics.jsonl", "result.json"])
    assert sent[-1] == "events.jsonl"


def test_only_changed_files_of_a_run_are_copied(quick, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "checkpoints").mkdir()
    for name in ("config.yaml", "logs/rank-0.log", "checkpoints/x", ".lock"):
        (tmp_path / name).write_text(name)
    (tmp_path / "remote.json").write_text(json.dumps({"address": ADDRESS}))
    remote = RemoteRun.of(tmp_path)
    assert remote is not None and RemoteRun.of(tmp_path / "fit-2") is not None and RemoteRun.of(tmp_path.parent) is None
    remote.push()
    assert set(quick.objects("mine/")) == {"config.yaml", "logs/rank-0.log"}
    quick.requests.clear()
    (tmp_path / "config.yaml").write_text("changed")
    remote.push()
    assert quick.objects("mine/")["config.yaml"] == b"changed"
    assert {each for each in quick.requests if each.startswith("PUT")} == {"PUT /bucket/mine/config.yaml"}
    assert remote.checkpoints_of(tmp_path / "fit-2") == f"{ADDRESS}/fit-2/checkpoints"
