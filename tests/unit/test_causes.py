"""The cause among several failures, and a traceback that starts where the user's code does."""

from __future__ import annotations

import dataclasses
import json

import pytest

from distributed.config.registry import REGISTRY, PeerErrors, hint_of
from distributed.launching.causes import Failure, full_traceback, root_cause, short_traceback
from distributed.launching.worker import _failed

LOST = "[../gloo/transport/tcp/pair.cc:554] Connection closed by peer [127.0.0.1]:4711"


def test_a_lost_connection_is_never_the_cause_of_an_exception():
    lost = Failure(0, "exception", 1.0, "RuntimeError", LOST)
    real = Failure(1, "exception", 1.2, "ValueError", "boom")

    assert root_cause([lost, real]) is real


def test_a_killed_rank_is_the_cause_of_lost_connections():
    lost = Failure(0, "exception", 1.0, "DistNetworkError", "anything")
    killed = Failure(1, "signal", 1.5, signum=9)

    assert root_cause([lost, killed]) is killed
    assert str(killed) == "rank 1 was killed by signal 9 (SIGKILL)"


def test_an_abort_gives_way_to_an_exception():
    abort = Failure(0, "signal", 1.0, signum=6)
    real = Failure(1, "exception", 1.2, "ValueError", "boom")

    assert root_cause([abort, real]) is real
    assert root_cause([abort]) is abort


def test_the_rank_that_failed_is_named_and_not_the_one_that_repeats_its_error():
    echo = Failure(0, "error", 1.0, "TrainingError", "metric 'f1' failed", is_echo=True)
    real = Failure(1, "error", 1.1, "TrainingError", "metric 'f1' failed")
    assert root_cause([echo, real]) is real


def test_the_earliest_of_two_causes_wins():
    first, second = Failure(1, "exception", 1.0, "KeyError", "a"), Failure(0, "exit", 1.1, exit_code=3)

    assert root_cause([second, first]) is first
    assert str(second) == "rank 0 exited with code 3"


def test_an_error_of_the_user_that_mentions_a_connection_is_a_cause():
    assert not Failure(0, "exception", 1.0, "ValueError", "Connection reset in the config").is_consequence


@pytest.mark.parametrize(
    ("kind", "message", "is_consequence"),
    [
        ("DistBackendError", "NCCL communicator was aborted on rank 1", True),
        ("DistBackendError", "NCCL error: invalid usage", False),
        ("DistStoreError", "anything", True),
        ("HorovodInternalError", "Horovod has been shut down. This was caused by ...", True),
        ("HorovodInternalError", LOST, True),  # Horovod communicates over gloo
        ("HorovodInternalError", "Mismatched allreduce tensor shapes", False),
        ("RuntimeError", "Horovod has been shut down", True),
        ("RuntimeError", "CUDA error: device-side assert triggered", False),
        ("BrokenPipeError", "anything", True),
    ],
)
def test_the_type_and_the_message_of_an_engines_error_tell_whether_another_rank_has_ended(
    kind, message, is_consequence
):
    assert Failure(0, "exception", 1.0, kind, message).is_consequence is is_consequence


def test_the_entry_of_a_new_engine_says_how_it_reports_a_lost_rank(monkeypatch):
    lost = Failure(0, "exception", 1.0, "ToyError", "rank 1 has left")
    assert not lost.is_consequence
    errors = PeerErrors(general_types=("ToyError",), messages=("has left",))
    entry = dataclasses.replace(REGISTRY["single"], name="toy", peer_errors=errors)
    monkeypatch.setitem(REGISTRY, "toy", entry)
    assert lost.is_consequence
    assert not dataclasses.replace(lost, message="no such file").is_consequence


def fail_in_a_library():
    try:
        json.loads("{")
    except ValueError as error:
        raise KeyError("outer") from error


@pytest.fixture
def error():
    with pytest.raises(KeyError) as caught:
        fail_in_a_library()
    return caught.value


def test_the_short_traceback_keeps_the_users_frames_and_where_it_failed(error):
    text = short_traceback(error)

    assert "fail_in_a_library" in text
    assert "raw_decode" in text
    assert "in loads" not in text
    assert "library frames are in the log" in text
    assert text.splitlines()[-1] == "KeyError: 'outer'"
    assert "in loads" in full_traceback(error)


DOUBLE = [
    "mat1 and mat2 must have the same dtype, but got Double and Float",
    "expected m1 and m2 to have the same dtype, but got: double != float",
    "Input type (double) and bias type (float) should be the same",
    "RNN input dtype (torch.float64) does not match weight dtype (torch.float32). Convert input: ...",
    "Found dtype Double but expected Float",
]


def test_float64_data_is_told_in_every_form_of_torchs_message_and_a_float64_model_is_not():
    assert {hint_of(said) for said in DOUBLE} == {hint_of(DOUBLE[0])} and "dtype='float64'" in hint_of(DOUBLE[0])
    for said in ("mat1 and mat2 must have the same dtype, but got Float and Double", "got: float != double"):
        assert hint_of(said) is None


@pytest.mark.parametrize(
    "said",
    [
        "Attempt to convert a value (PerReplica:{0: 1}) with an unsupported type to a Tensor.",
        "'Variable' object has no attribute 'ref'",  # Horovod's BroadcastGlobalVariablesCallback beside Keras 3
    ],
)
def test_a_known_error_of_another_engine_comes_with_one_line_that_helps(said):
    reports = []
    assert _failed(ValueError(said), reports.append) == _failed(ValueError("another"), reports.append) == 1
    known, other = reports
    for kind in ("traceback", "full_traceback"):
        assert known[kind].splitlines()[-1] == f"hint: {hint_of(said)}" and "distributed.Trainer" in hint_of(said)
        assert "hint" not in other[kind]
