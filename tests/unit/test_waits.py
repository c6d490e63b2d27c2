"""What DDP's own clock says of a log line."""

from __future__ import annotations

import pytest

from distributed.backends._torch.waits import DDPWaits


def data(iteration, exchange_ms, overlap_ms):
    """As torch has it: whole nanoseconds."""
    times = {"comm": exchange_ms, "compute_comm_overlap": overlap_ms}
    return {"iteration": iteration, **{f"avg_backward_{name}_time": int(ms * 1e6) for name, ms in times.items()}}


def test_slow_first_updates_do_not_weigh_on_later_log_lines():
    waits = DDPWaits()
    assert waits.take({"iteration": 0}) is None
    assert waits.take(data(4, 30.0, 10.0)) == pytest.approx(0.020)
    mean = (4 * 30.0 + 6 * 5.0) / 10
    assert waits.take(data(10, mean, 4.0)) == pytest.approx(0.005)  # six of 5 ms, beside which nothing was computed
    assert waits.take(data(10, mean, 4.0)) == pytest.approx(0.005)  # none was measured meanwhile
    mean = (10 * mean + 1.0) / 11
    assert waits.take(data(100, mean, 40 / 11)) == pytest.approx(0.001, rel=1e-3)
    assert waits.take(data(300, (11 * mean + 2 * 2.0) / 13, (40 + 2 * 3.0) / 13)) == 0.0  # more computed than waited


def test_more_updates_are_measured_on_request_and_none_is_counted_twice():
    waits = DDPWaits(every=10)
    assert waits.take_new(data(10, 5.0, 4.0)) == pytest.approx(0.001)
    assert waits.take_new(data(10, 5.0, 4.0)) is None
    assert waits.take_new(data(20, (10 * 5.0 + 9.0) / 11, (10 * 4.0 + 2.0) / 11)) == pytest.approx(0.007, rel=1e-3)
    assert waits.take(data(29, 5.0, 4.0)) == pytest.approx(0.007, rel=1e-3)  # none was measured meanwhile
