"""The fixtures of conftest.py notice what they promise to notice."""

from __future__ import annotations

import re
import signal
import sys

import pytest

from tests.conformance import test_whole_model
from tests.conftest import needs_backend

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
    case = next(each for each in test_whole_model.CHECKED if each[1] == "adapted")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("REQUIRE_BACKENDS", raising=False)

    with pytest.raises(pytest.skip.Exception, match=f"backend {case[0]} needs peft"):
        test_whole_model.test_a_saved_model_is_the_checkpoint_bit_for_bit(None, *case)
    monkeypatch.setenv("REQUIRE_BACKENDS", case[0])
    with pytest.raises(pytest.fail.Exception, match=r"needs peft, .* and REQUIRE_BACKENDS names it"):
        test_whole_model.test_a_saved_model_is_the_checkpoint_bit_for_bit(None, *case)
