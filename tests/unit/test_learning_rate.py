"""The curve of the learning-rate finder: which rate it suggests, and when there is none."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random

import numpy
import pytest

from distributed import ConfigError
from distributed.callbacks.of_fit import bound
from distributed.finders.curve import Divergence, LearningRateCurve
from distributed.finders.learning_rate import LossRecorder, RateRange, _begin, _finish
from distributed.state import TrainState
from tests.unit.contexts import a_context

STEPS = 100
REQUEST = RateRange(1e-7, 1.0, STEPS)


def falling(noise=0.0, until=STEPS, steepest=1e-3):
    """A loss that falls from 2 to 1 around the rate `steepest`, and rises after 0.1."""
    draw = random.Random(0)
    losses = []
    for i in range(until):
        place = -7 + 7 * i / (STEPS - 1)  # log10 of the rate
        fall = 1 / (1 + math.exp(-3 * (place - math.log10(steepest))))
        losses.append(2 - fall + math.exp(6 * (place + 1)) / 100 + draw.gauss(0, noise))
    return losses


def test_the_rates_rise_by_the_same_factor_from_end_to_end():
    rates = REQUEST.curve([1.0] * STEPS).rates
    assert rates[0] == pytest.approx(1e-7) and rates[-1] == 1.0
    assert {round(b / a, 9) for a, b in itertools.pairwise(rates)} == {round(1e7 ** (1 / 99), 9)}


@pytest.mark.parametrize(("noise", "decades"), [(0.0, 0.08), (0.05, 0.4)])
@pytest.mark.parametrize("steepest", [1e-4, 1e-3])
def test_the_suggestion_is_where_the_loss_falls_steepest(noise, decades, steepest):
    suggestion = REQUEST.curve(falling(noise, steepest=steepest)).suggestion
    assert abs(math.log10(suggestion / steepest)) < decades


def test_a_loss_that_only_wavers_or_rises_suggests_nothing():
    draw = random.Random(0)
    wavering = [2.3 + draw.gauss(0, 0.2) for _ in range(STEPS)]
    rising = [2 + i / STEPS for i in range(STEPS)]
    for losses in (wavering, rising):
        with pytest.raises(ConfigError, match="does not fall anywhere between the rates 1e-07 and 1:"):
            _ = REQUEST.curve(losses).suggestion
    with pytest.raises(ConfigError, match=r"diverged after 3 updates, at rate 1.38e-07: lower min_rate"):
        _ = REQUEST.curve([1.0, 2.0, 5.0]).suggestion
    with pytest.raises(ConfigError, match="NaN or infinite at the first update, before any rate"):
        _ = REQUEST.curve([]).suggestion


def test_four_times_the_best_smoothed_loss_has_diverged_and_one_bad_batch_has_not():
    divergence = Divergence()
    assert not any(divergence.add(loss) for loss in [1.0] * 20 + [10.0] + [1.0] * 5)
    assert divergence.add(100.0)
    assert Divergence().add(math.nan) and Divergence().add(math.inf)


def test_the_end_of_a_finder_holds_after_a_restart():
    recorder, again, stopped = LossRecorder(), LossRecorder(), []
    with bound([recorder, again], a_context(stopped.append)):
        recorder.on_train_start(TrainState())
        for loss in (1.0, 1.0, math.nan):
            recorder.on_log(TrainState(), "train", {"loss": loss})
        assert recorder.losses == [1.0, 1.0] and stopped == ["diverged"]
        again.load_state_dict(recorder.state_dict())
        again.on_train_start(TrainState())
        assert again.losses == [1.0, 1.0] and stopped == ["diverged"] * 2


def test_a_run_that_goes_on_takes_a_kept_curve_of_the_same_range_alone(tmp_path):
    kept = tmp_path / "learning-rate"
    kept.mkdir()
    (kept / "config.yaml").touch()
    _finish(kept, REQUEST, [2.0, 1.0])
    assert _begin(kept, REQUEST, goes_on=True) == [2.0, 1.0]
    assert _begin(kept, RateRange(1e-7, 2.0, STEPS), goes_on=True) is None and not kept.exists()


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (RateRange(0.1, 0.1, 100), "min_rate=0.1 is not below max_rate=0.1"),
        (RateRange(0, 1.0, 100), "min_rate=0 is not a rate"),
        (RateRange(1e-7, math.inf, 100), "max_rate=inf is not a rate"),
        (RateRange(1e-7, "1", 100), "max_rate='1' is not a rate"),  # type: ignore[arg-type]
        (RateRange(1e-7, 1.0, 19), "num_steps=19 is too few for a curve: give a whole number, at least 20"),
        (RateRange(1e-7, 1.0, 30.0), "num_steps=30.0"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_range_is_refused(request_, said):
    with pytest.raises(ConfigError, match=said):
        request_.checked()


def test_numbers_of_numpy_are_numbers():
    found = RateRange(numpy.float32(0.5), numpy.float64(1), numpy.int64(30)).checked()  # type: ignore[arg-type]
    assert found == RateRange(0.5, 1.0, 30) and json.dumps(dataclasses.asdict(found))


def test_the_plot_shows_the_curve_and_the_suggestion_where_there_is_one(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    curve = REQUEST.curve(falling())
    (axes,) = curve.plot(str(tmp_path / "curve.png")).axes
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list(axes.lines[0].get_xdata()) == curve.rates and list(axes.lines[0].get_ydata()) == curve.losses
    assert axes.lines[2].get_xdata()[0] == curve.suggestion and axes.get_xscale() == "log"
    assert len(LearningRateCurve(curve.rates, curve.rates, STEPS).plot().axes[0].lines) == 2
