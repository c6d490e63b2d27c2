"""When a profile begins and ends, and what is told of it."""

from __future__ import annotations

import io
import sys
import types

import pytest

from distributed.config.merging import MergedConfig, Overrides
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.launcher.start import launch_request
from distributed.loggers import profiling
from distributed.loggers.profiling import Profile, Profiling
from distributed.runs.directory import RunDirectory
from distributed.state import StepResult, TrainState, WorkerContext
from tests.conftest import needs_backend

FOUND = Profile(
    seconds=0.5, operators={name: (cost, 6) for name, cost in zip("abcdefg", (1, 7, 2, 6, 3, 5, 4), strict=True)},
    communication_s=0.125, device="CPU",
)  # fmt: skip


def request(tmp_path, monkeypatch, **flags):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return launch_request(Overrides(flag={"device": "cpu", "nproc_per_node": 2, **flags}, script="train.py"), None)


@pytest.mark.parametrize(("backend", "is_silenced"), [(None, True), ("fsdp", True), ("tensorflow", False)])
def test_the_launcher_silences_the_profiler_of_torch(backend, is_silenced, tmp_path, monkeypatch):
    if backend is not None:
        needs_backend(backend)
    engine = {} if backend is None else {"backend": backend}
    silenced = {"KINETO_LOG_LEVEL": "99"} if is_silenced else {}

    assert request(tmp_path, monkeypatch, profile=True, **engine).launcher_environ == silenced
    assert request(tmp_path, monkeypatch, **engine).launcher_environ == {}


class Recorder:
    """An engine's profiler that remembers before which update each call came."""

    def __init__(self):
        self.calls, self.update, self.found = [], 1, FOUND

    def start(self):
        self.calls.append(("start", self.update))

    def step(self):
        self.calls.append(("step", self.update))

    def stop(self):
        self.calls.append(("stop", self.update))
        return self.found


def profiling_of(tmp_path, profiler, rank=0, **schedule):
    """(a fit's callback, what was told)."""
    told = []
    settings = {"profile": True, **schedule}
    config = DistributedConfig(**settings)
    fit = types.SimpleNamespace(
        merged=MergedConfig(config, dict.fromkeys(settings, "code")), run=RunDirectory(tmp_path), on_event=told.append,
        context=WorkerContext(rank, 2, rank, 2, 0, "cpu"),
        backend=types.SimpleNamespace(
            observer=types.SimpleNamespace(profiler=lambda directory, warmup, active: profiler)
        ),
    )  # fmt: skip
    return Profiling(fit), told


def run(tmp_path, updates, rank=0, error=None, found=FOUND, **schedule):
    """(calls, what was told) of a fit of `updates`."""
    recorder = Recorder()
    recorder.found = found
    profile, told = profiling_of(tmp_path, recorder, rank, **schedule)
    profile.on_train_start(TrainState())
    for recorder.update in range(2, updates + 2):
        profile.on_step_end(TrainState(step=100 + recorder.update - 1), StepResult([]))
    state = TrainState(step=100 + updates)
    profile.on_error(state, error) if error is not None else profile.on_train_end(state)
    return recorder.calls, [(each["kind"], each["text"]) for each in told]


@pytest.mark.parametrize("wait", [0, 3])
def test_the_schedule_waits_warms_up_and_records(tmp_path, wait):
    calls, told = run(tmp_path, 20, profile_wait=wait, profile_warmup=2, profile_active=3)

    first = wait + 1
    assert calls == [("start", first), *(("step", first + n) for n in range(1, 6)), ("stop", first + 5)]
    assert f"profile of updates {100 + wait + 3} to {100 + wait + 5}: {tmp_path}/profile" in told[0][1]


def test_the_five_costliest_operators_and_the_share_of_communication_are_told(tmp_path):
    _, told = run(tmp_path, 20, profile_active=2)

    assert [kind for kind, _ in told] == ["notice"] * 7
    assert [text.split()[-1] for _, text in told[1:6]] == ["b", "d", "f", "g", "e"]
    assert told[1][1].split() == ["25.0%", "3500.000", "ms", "3", "calls", "an", "update", "b"]
    assert told[6][1].strip().startswith("communication: under way in 25.0% of the time")


def test_a_run_that_ends_while_it_records_has_what_was_recorded(tmp_path):
    _, told = run(tmp_path, 5, profile_wait=2, profile_warmup=1, profile_active=9)

    assert "profile of updates 104 to 105" in told[0][1]


@pytest.mark.parametrize("updates", [2, 5])
def test_a_run_that_ends_before_is_told_so(tmp_path, updates):
    calls, told = run(tmp_path, updates, found=None, profile_wait=4, profile_warmup=1)

    assert (
        told == [("warning", told[0][1])]
        and "nothing was profiled" in told[0][1]
        and "lower profile_wait" in told[0][1]
    )
    assert [name for name, _ in calls] == (["start", "step", "stop"] if updates == 5 else [])


def test_only_the_main_process_tells_and_an_error_ends_it_quietly(tmp_path):
    assert run(tmp_path, 20, rank=1)[1] == []
    calls, told = run(tmp_path, 12, error=RuntimeError())
    assert calls[-1][0] == "stop" and told == []


def test_a_fit_that_fails_before_it_starts_stops_nothing(tmp_path):
    recorder = Recorder()
    profile, _ = profiling_of(tmp_path, recorder, profile_wait=0)
    profile.on_error(TrainState(), RuntimeError("of another callback, in on_train_start"))

    assert recorder.calls == []


def begin(profile, wait):
    profile.on_train_start(TrainState())
    for _ in range(wait):
        profile.on_step_end(TrainState(), StepResult([]))


@pytest.mark.parametrize("wait", [0, 2])
def test_a_profiler_of_the_users_is_refused_and_left_alone(tmp_path, wait):
    import torch

    from distributed.backends._torch.profiler import TorchProfiler

    ours = TorchProfiler(tmp_path, 0, torch.device("cpu"), 1, 1)
    profile, told = profiling_of(tmp_path, ours, profile_wait=wait)
    with torch.profiler.profile() as users:
        with pytest.raises(ConfigError, match="another torch profiler is already running") as refusal:
            begin(profile, wait)
        profile.on_error(TrainState(), refusal.value)
        torch.ones(2).sum()
    assert "aten::sum" in {row.key for row in users.key_averages()} and told == []


def test_horovods_timeline_begins_only_with_a_profiler_that_does(tmp_path):
    from distributed.backends._horovod.timeline import WithTimeline

    class Refusing(Recorder):
        def start(self):
            raise ConfigError("of your own")

    begun = []
    hvd = types.SimpleNamespace(start_timeline=begun.append)
    with pytest.raises(ConfigError, match="of your own"):
        WithTimeline(Refusing(), hvd, tmp_path, begun.append).start()
    assert begun == []


def test_a_count_of_operations_that_cannot_be_written_costs_the_count(tmp_path):
    import torch

    from distributed.backends._deepspeed.profiler import DeepSpeedProfiler

    class Counter:
        calls = ()

        def stop_profile(self):
            self.calls += ("stop",)

        def print_model_profile(self, output_file):
            sys.stdout = self.file = io.StringIO()  # as the real one does it, with a file
            raise OSError(28, "No space left on device")

        def end_profile(self):
            self.calls += ("end",)

    (tmp_path / "profile").mkdir()
    profiler = DeepSpeedProfiler(tmp_path / "profile", 1, torch.device("cpu"), 1, 1, torch.nn.Linear(1, 1))
    before, counter = sys.stdout, Counter()
    profiler.start()
    profiler._counter = counter
    for _ in range(2):
        profiler.step()
        torch.ones(2).sum()
    found = profiler.stop()

    assert sys.stdout is before and counter.file.closed and counter.calls == ("stop", "end")
    assert "No space left on device" in found.lost and "aten::sum" in found.operators


def test_the_operators_are_torchs_and_no_annotations(tmp_path):
    import torch

    from distributed.backends._torch.profiler import TorchProfiler

    profiler = TorchProfiler(tmp_path, 0, torch.device("cpu"), 1, 1)
    profiler.start()
    for _ in range(2):
        with torch.profiler.record_function("mine"):
            torch.ones(2).sum()
        profiler.step()
    found = profiler.stop()

    assert "aten::sum" in found.operators and "mine" not in found.operators


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path):
    lost = Profile(FOUND.seconds, FOUND.operators, None, "CPU", lost="No space left on device")
    _, told = run(tmp_path, 20, found=lost)

    assert told[0] == ("warning", f"the trace cannot be written to {tmp_path}/profile (No space left on device)")
    assert [kind for kind, _ in told[1:]] == ["notice"] * 6  # no communication is known


def test_times_that_overlap_count_once():
    assert profiling.length_of_union([(0, 2), (1, 3), (5, 6), (5.5, 5.6)]) == 4
    assert profiling.length_of_union([]) == 0
