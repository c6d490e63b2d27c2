"""`distributed runs` filters, sorts and deletes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed.cli.__main__ import run as run_command
from distributed.errors import ConfigError, ResourceError
from distributed.runs.deleting import check_deletable, delete_run, kept_elsewhere
from distributed.runs.directory import RunDirectory
from distributed.runs.listing import list_runs, read_state_of
from distributed.runs.selecting import RunFilter

CONFIG = """\
learning_rate: {rate}
max_steps: null
fsdp: {{cpu_offload: true}}
deterministic: false
hyperparameters: {{hidden: 64}}
sources: {{learning_rate: code}}
"""


def make_run(path: Path, rate: float = 0.1, began: float = 0.0, **result: Any) -> Path:
    (path / "checkpoints/step-00000004").mkdir(parents=True)
    (path / "checkpoints/step-00000004/weights").write_bytes(bytes(1000))
    (path / "config.yaml").write_text(CONFIG.format(rate=rate))
    content = {"status": "finished", "backend": "fsdp", "world_size": 2, "num_nodes": 1, "steps": 4} | result
    (path / "result.json").write_text(json.dumps(content))
    (path / "events.jsonl").write_text(json.dumps({"time": began, "event": "started", "step": 0}) + "\n")
    return path


@pytest.fixture
def three(tmp_path, monkeypatch):
    """Three runs in ./runs: `a` is the oldest and has the best loss, `c` has no metrics."""
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs/a"), 0.1, 100.0, best_metrics={"val_loss": 0.2, "val_accuracy": 0.7}, total_time=30.0)
    make_run(
        Path("runs/b"),
        0.2,
        200.0,
        backend="single",
        best_metrics={"val_loss": 0.4, "val_accuracy": 0.8},
        total_time=10.0,
    )
    make_run(Path("runs/c"), 0.3, 300.0, status="failed")
    return Path("runs")


def listed(capsys: Any, *words: str) -> list[str]:
    capsys.readouterr()
    assert run_command(["runs", "--json", *words]) == 0
    return [Path(each["run"]).name for each in json.loads(capsys.readouterr().out)]


@pytest.mark.parametrize(
    ("conditions", "names"),
    [
        (["val_loss<0.3"], "a"),
        (["val_loss >= 0.4"], "b"),
        (["val_loss!=0.4"], "a"),
        (["val_loss=null"], "c"),
        (["status=failed"], "c"),
        (["status!=fai*"], "ba"),
        (["backend=fsdp"], "ca"),
        (["backend=fsdp", "status=finished"], "a"),
        (["name=[ab]"], "ba"),
        (["learning_rate>0.15"], "cb"),
        (["learning_rate==2e-1"], "b"),
        (["fsdp.cpu_offload=true"], "cba"),
        (["deterministic=true"], ""),
        (["max_steps=null", "step=4"], "cba"),
        (["max_steps!=null"], ""),
        (["hidden=64", "duration<0.25min"], "b"),
        (["age<7d"], ""),
    ],
)
def test_conditions_choose_runs_by_columns_metrics_settings_and_hyperparameters(three, capsys, conditions, names):
    words = [word for condition in conditions for word in ("--where", condition)]
    assert listed(capsys, *words) == list(names)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], "cba"),
        (["--sort", "started", "--reverse"], "abc"),
        (["--sort", "val_loss"], "abc"),
        (["--sort", "val_accuracy"], "bac"),
        (["--sort", "val_loss", "--reverse"], "bac"),  # a run without the metric is last in any order
        (["--sort", "duration"], "bac"),
        (["--sort", "learning_rate", "--limit", "2"], "ab"),
        (["--sort", "name", "--reverse", "--limit", "1"], "c"),
    ],
)
def test_the_newest_the_best_or_the_smallest_is_first(three, capsys, words, names):
    assert listed(capsys, *words) == list(names)


def test_runs_of_several_directories_are_one_list_and_each_is_in_it_once(three, capsys):
    make_run(Path("more/d"), 0.1, 250.0)
    assert listed(capsys, "runs", "more", "runs/a") == ["c", "d", "b", "a"]


def test_the_table_shows_the_metric_that_sorts_it_within_eighty_columns(three, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    make_run(Path("runs") / ("x" * 60 + "-end"), best_metrics={"val_accuracy": 0.5})
    run_command(["runs", "--sort", "val_accuracy", "--where", "name=b"])
    assert "val_accuracy 0.8" in capsys.readouterr().out
    run_command(["runs", "--sort", "val_accuracy"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and any("..." in line and "-end" in line for line in lines), lines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--where", "val_los<1"], r"no run here has 'val_los' \(did you mean 'val_loss'\?\)"),
        (["--sort", "val_los"], r"--sort val_los: no run here has"),
        (["--where", "val_loss"], "has no NAME=VALUE form"),
        (["--where", "val_loss<"], "has no NAME=VALUE form"),
        (["--where", "val_loss<low"], "compared with a number, not 'low'"),
        (["--where", "val_loss<3h"], "compared with a number, not '3h'"),
        (["--where", "age<soon"], "like 90s, 15min, 3h or 7d, not 'soon'"),
        (["--where", "status<3"], r"status is no number \(failed\): compare it with = or !="),
        (["--yes"], "--yes has no effect without --delete: add --delete, or drop --yes"),
        (["--delete", "--json"], "exclude each other"),
        (["--limit", "0"], "--limit"),
    ],
)
def test_what_cannot_be_meant_is_an_error_of_one_line(three, words, message):
    with pytest.raises(ConfigError, match=message) as raised:
        run_command(["runs", *words])
    assert "\n" not in str(raised.value)


# ------------------------------------------------------------------ deleting


def test_the_chosen_runs_are_listed_and_deleted_with_their_checkpoints(three, capsys):
    assert run_command(["runs", "--where", "val_loss>0.3", "--delete", "--yes"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("runs/b  (finished, step 4, ") and out.splitlines()[1].startswith("deleted 1 run (")
    assert sorted(path.name for path in three.iterdir()) == ["a", "c"]
    assert "runs/a" not in out and "runs/c" not in out
    assert run_command(["runs", "--where", "val_loss>0.3", "--delete", "--yes"]) == 0  # nothing is left to delete
    assert capsys.readouterr().out == "no such runs in runs\n"


@pytest.mark.parametrize(("answer", "is_kept"), [("y\n", False), ("n\n", True), ("\n", True)])
def test_a_terminal_is_asked(three, run_cli_at_terminal, answer, is_kept):
    code, shown = run_cli_at_terminal(["runs", "runs/a", "--delete"], answer)
    assert "delete 1 run (" in shown and (three / "a").exists() == is_kept
    assert code == (130 if is_kept else 0)


@pytest.fixture
def run_cli_at_terminal(start, tmp_path):
    """Run a command whose input is a terminal that `answer` was typed into, and return its exit code and output."""

    def run(words: list[str], answer: str) -> tuple[int, str]:
        import sys

        main, side = pty.openpty()
        os.write(main, answer.encode())
        code = (
            "import os, sys; os.dup2(os.open(sys.argv[1], os.O_RDONLY | os.O_NOCTTY), 0);"
            "from distributed.cli.__main__ import main; main(sys.argv[2:])"
        )
        try:
            done = start([sys.executable, "-c", code, os.ttyname(side), *words], cwd=tmp_path).finish(60)
        finally:
            os.close(main)
            os.close(side)
        return done.returncode, done.output

    return run


def test_without_a_terminal_nothing_is_deleted_unasked(three, monkeypatch):
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        with pytest.raises(ConfigError, match="add --yes"):
            run_command(["runs", "--delete"])
    assert len(list(three.iterdir())) == 3


def test_a_run_that_is_going_on_keeps_all_chosen_runs(three):
    run = RunDirectory(three / "b")
    run.lock()
    try:
        with pytest.raises(ResourceError, match="in use by process"):  # finished, but its launcher has not ended
            run_command(["runs", "runs", "--delete", "--yes"])
        (three / "b/result.json").write_text(json.dumps({"status": "running"}))
        with pytest.raises(ResourceError, match="'runs/b' is running and is not deleted: stop it first"):
            run_command(["runs", "runs", "--delete", "--yes"])
    finally:
        run.unlock()
    assert len(list(three.iterdir())) == 3
    assert run_command(["runs", "--where", "status=killed", "--delete", "--yes"]) == 0
    assert not (three / "b").exists()


def test_all_runs_are_not_deleted_unasked_unless_they_are_named(three):
    with pytest.raises(
        ConfigError, match=r"--delete --yes would delete every run in \./runs: name runs, or choose some"
    ):
        run_command(["runs", "--delete", "--yes"])
    assert len(list(three.iterdir())) == 3


def test_a_further_fit_of_a_run_on_another_machine_counts_as_going_on(three):
    (three / "a/.lock").write_text(f"process 1 on not-{socket.gethostname()}\n")
    check_deletable(read_state_of(three / "a"))  # finished there
    (three / "a/fit-2").mkdir()
    (three / "a/fit-2/result.json").write_text(json.dumps({"status": "running"}))
    with pytest.raises(ResourceError, match="stop it first"):
        check_deletable(read_state_of(three / "a"))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    run = RunDirectory(path)
    run.lock()
    try:
        yield
    finally:
        run.unlock()


def test_a_further_fit_goes_on_while_the_launcher_of_its_run_lives(three, capsys):
    make_run(three / "a/fit-2", status="running")
    with locked(three / "a"):
        assert read_state_of(three / "a/fit-2").status == "running"
        with pytest.raises(ResourceError, match="'runs/a/fit-2' is running and is not deleted: stop it first"):
            run_command(["runs", "runs/a/fit-2", "--delete", "--yes"])
        (three / "a/fit-2/result.json").write_text(json.dumps({"status": "finished"}))
        with pytest.raises(
            ResourceError,
            match=r"process \d+ on .* works in '.*/runs/a', which contains this run: stop that process first",
        ):
            run_command(["runs", "runs/a/fit-2", "--delete", "--yes"])
    assert run_command(["runs", "runs/a/fit-2", "--delete", "--yes"]) == 0
    assert [path.name for path in (three / "a").glob("fit-*")] == []


def test_a_further_fit_that_was_cut_off_is_killed_once_its_launcher_has_ended(three):
    make_run(three / "a/fit-2", status="running")
    with locked(three / "a"):
        pass
    assert read_state_of(three / "a/fit-2").status == "killed"


def test_a_trial_of_a_sweep_that_goes_on_is_not_deleted(three):
    trial = make_run(Path("sweep/trials/00000"), status="running")
    (trial / ".lock").write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    with locked(Path("sweep")):
        assert read_state_of(trial).status == "killed"  # the trial alone has ended
        with pytest.raises(
            ResourceError, match=r"works in '.*/sweep', which contains this run: stop that process first"
        ):
            run_command(["runs", "sweep/trials", "--delete", "--yes"])
    assert run_command(["runs", "sweep/trials", "--delete", "--yes"]) == 0
    assert not trial.exists()


def test_a_holder_on_another_machine_counts_until_the_run_above_has_ended(three):
    fit = make_run(three / "a/fit-2")
    (three / "a/.lock").write_text(f"process 1 on not-{socket.gethostname()}\n")
    check_deletable(read_state_of(fit))
    (three / "a/result.json").write_text(json.dumps({"status": "running"}))
    with pytest.raises(ResourceError, match="which contains this run"):
        check_deletable(read_state_of(fit))
    (three / "a/result.json").write_text(json.dumps({"status": "finished"}))
    (three / ".lock").write_text("of another program\n")
    check_deletable(read_state_of(fit))


@pytest.mark.parametrize("inside", ["fit-2", "sub/other", "kept"])
def test_a_run_in_which_another_process_works_is_not_deleted(three, inside):
    (three / "a" / inside).mkdir(parents=True)
    with (
        locked(three / "a" / inside),
        pytest.raises(ResourceError, match=f"works in 'runs/a/{inside}' inside it: stop that first"),
    ):
        run_command(["runs", "runs/a", "--delete", "--yes"])
    assert run_command(["runs", "runs/a", "--delete", "--yes"]) == 0


def test_a_run_that_holds_another_run_is_not_deleted(three):
    for part in ("fit-2", "fit-2/learning-rate-2", "learning-rate"):
        make_run(three / "a" / part)
    check_deletable(read_state_of(three / "a"))
    for other in ("sub/other", "fit-2/more", "fit-mine"):
        make_run(three / "a" / other)
        with pytest.raises(ConfigError, match=f"'runs/a' holds another run, 'runs/a/{other}', and is not deleted"):
            run_command(["runs", "runs/a", "--delete", "--yes"])
        assert (three / "a" / other).is_dir()
        delete_run(read_state_of(three / "a" / other))
    make_run(Path("elsewhere"))
    (three / "a/link").symlink_to(Path("elsewhere").absolute())
    delete_run(read_state_of(three / "a"))
    assert not (three / "a").exists() and Path("elsewhere/events.jsonl").exists()


@pytest.mark.parametrize("line", ["null", "3", "[]", '{"step": 1}', '{"event": "started"}'])
def test_a_line_of_the_journal_that_is_no_event_is_ignored(three, capsys, line):
    (three / "a/events.jsonl").write_text(line + "\n" + (three / "a/events.jsonl").read_text())
    assert listed(capsys) == list("cba")
    (three / "b/events.jsonl").write_text("null\n")
    with pytest.raises(ConfigError, match=r"has no events\.jsonl of a run"):
        check_deletable(read_state_of(three / "b"))


def test_links_are_not_followed(three, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/kept").touch()
    (three / "a/checkpoints/data").symlink_to(tmp_path / "data")
    (three / "a/data").symlink_to(tmp_path / "data")
    (three / "a/.lock").symlink_to(tmp_path / "data/kept")
    (three / "latest").symlink_to("a")

    with pytest.raises(ConfigError, match="'runs/latest' is a link"):
        run_command(["runs", "--where", "name=a", "--delete", "--yes"])  # the name is that of the directory
    delete_run(read_state_of(three / "a"))

    assert (tmp_path / "data/kept").read_bytes() == b"" and not (three / "a").exists()


def test_a_directory_that_no_run_wrote_is_neither_listed_nor_deleted(three, tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    (tmp_path / "project/config.yaml").write_text("epochs: 3\n")
    assert list_runs(tmp_path / "project") == []
    (tmp_path / "project/result.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no events\.jsonl of a run"):
        run_command(["runs", "project", "--delete", "--yes"])
    monkeypatch.chdir(three / "a/checkpoints")
    with pytest.raises(ConfigError, match="holds the current directory"):
        run_command(["runs", "../../a", "--delete", "--yes"])


def test_a_deletion_that_was_cut_off_can_be_repeated(three, monkeypatch):
    removed = []

    def fails(path: Any, dir_fd: int) -> None:
        removed.append(path)
        raise OSError(13, "Permission denied", path)

    with monkeypatch.context() as patched:
        patched.setattr("distributed.runs.deleting.shutil.rmtree", fails)
        with pytest.raises(ConfigError, match=r"checkpoints in 'runs/a' cannot be removed \(Permission denied\)"):
            delete_run(read_state_of(three / "a"))
    assert removed == ["checkpoints"]
    delete_run(read_state_of(three / "a"))
    assert not (three / "a").exists()


def test_a_run_that_starts_meanwhile_is_not_deleted(three):
    (three / "a/.lock").write_text("process 1 on elsewhere\n")
    with open(three / "a/.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ResourceError, match="in use by"), RunDirectory(three / "a").held():
            pytest.fail("the lock is held by another")
    with RunDirectory(three / "a").held(), pytest.raises(ResourceError, match="in use by"):
        RunDirectory(three / "a").lock()


def test_what_a_run_stored_elsewhere_is_named_and_stays(three, tmp_path, capsys):
    (tmp_path / "kept").mkdir()
    (three / "a/config.yaml").write_text("checkpoint_dir: kept\ntensorboard_dir: null\n")
    (three / "a/remote.json").write_text(json.dumps({"address": "s3://bucket/a"}))
    assert kept_elsewhere(three / "a") == ["s3://bucket/a", "kept"]
    run_command(["runs", "runs/a", "--delete", "--yes"])
    assert "not deleted: s3://bucket/a\nnot deleted: kept\n" in capsys.readouterr().out
    assert (tmp_path / "kept").is_dir() and not (three / "a").exists()


def test_a_condition_keeps_its_text():
    assert RunFilter.of(" val_loss <= 0.3 ").operator == "<=" and RunFilter.of("x=a=b").value == "a=b"
