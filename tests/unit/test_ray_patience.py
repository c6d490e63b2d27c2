"""The launcher over Ray waits for resources and for lost nodes, says so, and gives up in time."""

from __future__ import annotations

import json
import threading
import time

import pytest

from distributed.backends._ray import patience
from distributed.backends._ray.patience import Patience
from distributed.errors import ResourceError
from distributed.runs.directory import RunDirectory

LATE = ResourceError("late")


class Shown:
    def __init__(self):
        self.lines = []

    def handle(self, event):
        self.lines.append(event["text"])


@pytest.fixture
def waiting(tmp_path, monkeypatch):
    """Return (a Patience with a node_timeout of 0.3 s, what it shows, its run)."""
    monkeypatch.setattr(patience, "_TICK_S", 0.01)
    run, shown = RunDirectory(str(tmp_path)), Shown()
    return Patience(run, shown, 0.3), shown.lines, run


def test_news_are_returned_in_their_order_and_too_late_is_an_error(waiting):
    wait, lines, _ = waiting
    wait.put("joined")
    wait.put("begun")
    assert [wait.news_within(5, LATE, "start_timeout") for _ in range(2)] == ["joined", "begun"]
    assert wait.news_within(0.05, LATE, "start_timeout") == "late" and wait.error is LATE and lines == []


def test_resources_are_waited_for_longer_than_an_answer(waiting, monkeypatch):
    wait, lines, _ = waiting
    monkeypatch.setattr(patience, "_LINE_S", 0.05)
    wait.put(("4 GPUs are missing", 60.0))
    threading.Timer(0.3, wait.put, ["joined"]).start()
    assert wait.news_within(0.1, LATE, "") == "joined"  # no longer within 0.1 s
    assert len(lines) > 2 and lines[0] == "waiting for resources: 4 GPUs are missing: 60 s left (wait)"
    wait.put(("4 GPUs are missing", 1e7))
    threading.Timer(0.1, wait.put, ["joined"]).start()
    wait.news_within(0.1, LATE, "")
    assert lines[-1] == "waiting for resources: 4 GPUs are missing"  # without an end


def test_rays_own_wait_may_end_a_little_later_than_the_countdown(waiting, monkeypatch):
    wait, lines, _ = waiting
    monkeypatch.setattr(patience, "_MARGIN_S", 0.5)
    wait.put(("4 GPUs are missing", 0.1))
    threading.Timer(0.3, wait.put, ["joined"]).start()
    assert wait.news_within(0.1, LATE, "") == "joined"
    wait.put(("4 GPUs are missing", 0.1))
    assert wait.news_within(0.1, LATE, "") == "late"
    assert set(lines) == {"waiting for resources: 4 GPUs are missing: 0 s left (wait)"}


def test_a_lost_node_is_waited_for_and_named(waiting):
    wait, lines, run = waiting
    wait.begin({"1": "node1", "2": "node2"})
    wait.saw_nodes(["2", "of another run"], "1 more node is needed")
    began = time.monotonic()
    assert wait.news_within(60, LATE, "start_timeout") == "late"
    assert 0.3 <= time.monotonic() - began < 5
    assert str(wait.error) == "node2 left the Ray cluster, and no replacement came within node_timeout=0.3 s"
    assert lines == [
        "node2 left the Ray cluster, and 1 more node is needed: waiting 0.3 s for a replacement (node_timeout)"
    ]
    assert [json.loads(line)["event"] for line in run.events.read_text().splitlines()] == ["node_lost"]


def test_after_a_replacement_only_the_start_is_waited_for(waiting):
    wait, lines, _ = waiting
    wait.begin({"1": "node1", "2": "node2"})
    wait.saw_nodes(["2"], "1 more node is needed")
    threading.Timer(0.1, wait.saw_nodes, [[], None]).start()
    threading.Timer(0.8, wait.put, ["begun"]).start()
    assert wait.news_within(60, LATE, "start_timeout") == "begun" and len(lines) == 1 and wait.error is None


def test_a_node_that_answers_again_is_reported(waiting):
    wait, lines, run = waiting
    wait.begin({"1": "node1", "2": "node2"})
    wait.saw_nodes(["2"], "no other node is there", "does not answer")
    threading.Timer(0.1, wait.put, ["begun"]).start()
    assert wait.news_within(60, LATE, "start_timeout") == "begun"
    wait.begin({"1": "node1", "2": "node2"})
    assert lines == [
        "node2 does not answer, and no other node is there: waiting 0.3 s for a replacement (node_timeout)",
        "node2 answers again",
    ]
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert [(each["event"], each["node"]) for each in events] == [("node_lost", "node2"), ("node_joined", "node2")]


def test_a_node_that_is_not_needed_is_only_reported(waiting):
    wait, lines, _ = waiting
    wait.begin({"1": "node1", "2": "node2"})
    wait.saw_nodes(["1"], None)
    threading.Timer(0.5, wait.put, ["begun"]).start()
    assert wait.news_within(60, LATE, "start_timeout") == "begun"
    assert lines == ["node1 left the Ray cluster: the workers start again on the other nodes"]
