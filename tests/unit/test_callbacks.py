"""The state of callbacks in a checkpoint."""

from __future__ import annotations

from distributed.callbacks import Callback, load_states, states


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
