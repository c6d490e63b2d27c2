"""The fixtures of conftest.py notice what they promise to notice."""

from __future__ import annotations

import json
import re
import signal
import sys

import pytest

from tests.conformance import test_whole_model
from tests.conftest import marked, needs_backend, poll

SLEEP = "import time; time.sleep(100)"


def test_commands_see_no_foreign_launcher(run_python, monkeypatch):
    monkeypatch.setenv("RANK", "3")

    done = run_python(["-c", "import os; print(os.environ.get('RANK'))"])

    assert (done.returncode, done.stdout) == (0, "None\n"), done.output


def test_a_process_left_behind_is_a_failure(start):
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"

    with pytest.raises(pytest.fail.Exception, match="left processes"):
        start([sys.executable, "-c", child]).finish(grace=0.2)


def test_time_is_limited_and_nothing_survives(start):
    command = start([sys.executable, "-c", SLEEP])

    with pytest.raises(pytest.fail.Exception, match="not done after") as failed:
        command.finish(timeout=2)
    assert re.search(
        r"\(<string>:1\)|[Pp]ermission [Dd]enied|no stacks", str(failed.value)
    )  # where it was, or why nobody may look
    assert command.alive() == []


def test_waits_for_text_and_says_when_it_cannot_come(start):
    command = start([sys.executable, "-u", "-c", f"print('hello'); {SLEEP}"])
    command.wait_for("hello")
    command.signal(signal.SIGTERM)

    assert command.finish().returncode == -signal.SIGTERM
    with pytest.raises(pytest.fail.Exception, match="did not come"):
        command.wait_for("goodbye")


def test_a_missing_library_skips_unless_the_backend_is_required(monkeypatch):
    monkeypatch.setattr("distributed.config.registry.importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("REQUIRE_BACKENDS", raising=False)

    with pytest.raises(pytest.skip.Exception, match="backend fsdp needs torch"):
        needs_backend("fsdp")
    monkeypatch.setenv("REQUIRE_BACKENDS", "single, fsdp")
    with pytest.raises(pytest.fail.Exception, match="REQUIRE_BACKENDS names it"):
        needs_backend("fsdp")
    monkeypatch.undo()
    needs_backend("fsdp")  # installed: nothing happens


def test_a_case_whose_library_is_missing_is_a_skip_that_says_so(monkeypatch):
    case = next(each.values for each in test_whole_model.CHECKED if each.values[1] == "adapted")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("REQUIRE_BACKENDS", raising=False)

    with pytest.raises(pytest.skip.Exception, match=f"backend {case[0]} needs peft"):
        test_whole_model.test_a_saved_model_is_the_checkpoint_bit_for_bit(None, *case)
    monkeypatch.setenv("REQUIRE_BACKENDS", case[0])
    with pytest.raises(pytest.fail.Exception, match=r"needs peft, .* and REQUIRE_BACKENDS names it"):
        test_whole_model.test_a_saved_model_is_the_checkpoint_bit_for_bit(None, *case)


FORKED = """
import atexit, json, os, subprocess, sys, threading
print(json.dumps([sys.argv, os.getcwd(), os.environ["KEY"], __name__, __file__, "torch" in sys.modules]))
sys.stderr.write("to stderr")
if "child" in sys.argv:
    subprocess.Popen(["sleep", "60"], start_new_session=True)
atexit.register(print, "at exit")
threading.Timer(0.2, print, ["from a thread"]).start()
if "error" in sys.argv:
    raise ValueError("on purpose")
sys.exit("in words" if "words" in sys.argv else 3)
"""


@pytest.mark.parametrize(
    ("argument", "code", "ending"),
    [("a b", 3, "to stderr"), ("words", 1, "in words"), ("error", 1, "ValueError: on purpose")],
)
def test_a_forked_command_is_like_one_from_nothing(start, tmp_path, argument, code, ending):
    script = tmp_path / "script.py"
    script.write_text(FORKED)
    argv = [sys.executable, "script.py", argument]
    forked, fresh = (start(argv, cwd=tmp_path, env={"KEY": "value"}, fresh=fresh) for fresh in (False, True))
    assert marked(forked.mark) and forked.mark != fresh.mark

    one, other = forked.finish(60), fresh.finish(60)

    assert one.is_forked and not other.is_forked
    for done in (one, other):
        assert done.returncode == code and done.stderr.rstrip().endswith(ending), done.output
        first, *last = done.stdout.splitlines()
        *facts, has_torch = json.loads(first)
        assert facts == [["script.py", argument], str(tmp_path), "value", "__main__", str(script)]
        assert has_torch == done.is_forked and last == ["from a thread", "at exit"]
    assert argument == "error" or one.stderr == other.stderr
    with pytest.raises(AssertionError, match="run it with fresh=True"):
        one.within(60)


def test_what_a_forked_command_leaves_behind_is_found(start, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FORKED)
    command = start([sys.executable, "script.py", "child"], cwd=tmp_path, env={"KEY": "value"}, fresh=False)
    with pytest.raises(pytest.fail.Exception, match=r"left processes .*sleep 60"):
        command.finish(60, grace=0.5)
    poll(lambda: not command.alive(), 5, lambda: "not killed")


def test_a_command_on_tensorflow_is_forked_from_a_process_that_has_imported_it(run_cli, tmp_path):
    needs_backend("tensorflow")
    script = tmp_path / "script.py"
    script.write_text("import tensorflow")
    done = run_cli(["train", "--script", script, "--backend", "tensorflow", "--run-dir", tmp_path / "run"])
    assert done.returncode == 0 and done.is_forked, done.output
    assert done.cpu_s < 3, done.output  # the import takes more


def test_a_command_that_could_notice_is_not_forked(start, tmp_path):
    (tmp_path / "script.py").write_text("")
    for argv, env in (
        (["-c", "pass"], {}),
        (["script.py"], {"OMP_NUM_THREADS": "2"}),
        (["script.py"], {"TORCH_LOGS": "all"}),
    ):
        command = start([sys.executable, *argv], cwd=tmp_path, env=env, fresh=False)
        assert not command.finish(60).is_forked
