"""The state of callbacks in a checkpoint, and what their hooks may use."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from distributed.callbacks import Callback
from distributed.callbacks.of_fit import bound, load_states, states
from distributed.errors import CheckpointError, ConfigError
from tests.unit.contexts import a_context


class Counts(Callback):
    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Totals(Counts):
    """Of another class, with a state of the same form."""


def test_a_callback_finds_its_own_state_wherever_it_stands():
    kept = states([Counts(1), Callback(), Totals(2), Counts(3)])
    first, second, totals, new = Counts(), Counts(), Totals(), Totals(7)
    assert load_states([Callback(), totals, new, first, second], kept) == []
    assert [callback.count for callback in (first, second, totals, new)] == [1, 3, 2, 7]


def test_a_state_that_no_callback_takes_is_named():
    kept = states([Counts(1), Totals(2), Counts(3)])
    assert load_states([Counts()], kept) == ["Totals", "Counts:2"]


def test_a_state_that_does_not_fit_its_callback_is_refused():
    with pytest.raises(CheckpointError, match=r"a state of Counts that does not fit it \(KeyError: 'count'\)"):
        load_states([Counts()], {"Counts": {}})


def test_outside_of_a_fit_the_context_is_an_error_that_says_so():
    callback = Counts()
    with pytest.raises(ConfigError, match=r"Counts.context is only available while fit\(\) runs: use it in a hook"):
        _ = callback.context
    assert not hasattr(callback, "contexts")  # other names are plain AttributeErrors


def test_the_context_is_there_for_the_fit_alone_also_where_that_fails():
    callback, given = Counts(), a_context()

    def fit():
        with bound([callback], given):
            assert callback.context is given and callback.context.run_dir == Path("/runs/one")
            raise KeyError

    with pytest.raises(KeyError):
        fit()
    with pytest.raises(ConfigError):
        _ = callback.context


def test_a_fit_within_a_hook_gives_the_outer_context_back():
    callback, outer, inner = Counts(), a_context(), a_context()
    with bound([callback], outer):
        with bound([callback], inner):
            assert callback.context is inner
        assert callback.context is outer


def test_a_callback_may_use_other_names_and_is_told_that_context_is_taken():
    class Own(Callback):
        def __init__(self):
            self._context, self._bind = [], []

    class Taken(Callback):
        def __init__(self):
            self.context = []

    callback, given = Own(), a_context()
    with bound([callback], given):
        assert callback.context is given
    assert callback._context == callback._bind == []
    with pytest.raises(ConfigError, match=r"Taken sets self.context, .* give the attribute another name"):
        Taken()


def test_the_context_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_context().run_dir = Path()
