"""report.html in a real headless Chromium: it draws, says nothing on its console and asks the network for nothing.

Screenshots are kept in build/screenshots, or in TEST_ARTIFACTS where that is set.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy
import pytest
from PIL import Image

from distributed.report import write_report
from tests.unit.report_files import BEGAN, write_run, write_sweep

ROOT = Path(__file__).resolve().parents[2]
# Of page.css: Okabe and Ito's blue and vermillion, and their lighter twins for dark mode.
BLUE, RED, GREEN, GREY = (0, 114, 178), (213, 94, 0), (0, 158, 115), (154, 163, 176)
DARK_BLUE, DARK_RED = (74, 168, 232), (255, 138, 61)
WHITE, BLACK = (255, 255, 255), (27, 32, 40)


@pytest.fixture(scope="module")
def artifacts():
    directory = Path(os.environ.get("TEST_ARTIFACTS") or ROOT / "build" / "screenshots")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def pixels(path, colour, tolerance=12):
    """How many pixels of a picture have `colour`."""
    with Image.open(path) as picture:
        data = numpy.asarray(picture.convert("RGB"), dtype=int)
    return int((abs(data - colour) <= tolerance).all(-1).sum())


def plot(page, title):
    """The selector of the plot below the heading `title`."""
    identity = page.evaluate(
        f"[...document.querySelectorAll('.panel')].find((p) => p.querySelector('h3').textContent === {title!r}).id"
    )
    return f"#{identity} .plot"


def opened(browser, file, artifacts, **how):
    """The page, drawn, with nothing wrong; its screenshot is kept."""
    page = browser.open(file, **how)
    page.wait("document.body.dataset.drawn")
    kind = f"{how.get('width', 1280)}{'-dark' if how.get('dark') else ''}"
    page.screenshot(artifacts / f"{file.stem}-{kind}.png")
    assert page.problems == [] and page.requests == []
    assert page.evaluate("document.documentElement.scrollWidth") == how.get("width", 1280)  # nothing sticks out
    return page


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run of two processes, one of which was killed once."""
    events = [
        {"time": BEGAN + 9, "event": "worker_failed", "rank": 1, "cause": "rank 1 was killed by SIGKILL"},
        {"time": BEGAN + 9.5, "event": "restarted", "restart_count": 1},
        {"time": BEGAN + 10, "event": "resumed", "step": 400, "checkpoint": "step-00000400"},
    ]
    directory = tmp_path_factory.mktemp("one")
    return write_report([write_run(directory / "run", events=events, slow_rank=1.3)], directory / "run.html")


def test_one_run_is_drawn_at_both_widths_in_light_and_dark(browser, one, artifacts, tmp_path):
    for width, dark, colours, ground in ((1280, False, (BLUE, RED), WHITE), (390, True, (DARK_BLUE, DARK_RED), BLACK)):
        page = opened(browser, one, artifacts, width=width, dark=dark)
        for title, least in (
            ("Loss", 100),
            ("Events", 20),
            ("Throughput", 100),
            ("Time of an update", 500),
            ("Time of each rank", 100),
        ):
            picture = page.screenshot(tmp_path / "plot.png", plot(page, title))
            assert pixels(picture, colours[0]) > least or pixels(picture, colours[1]) > least, (title, width)
            assert pixels(picture, ground) > 1000, (title, width)
        loss = page.screenshot(tmp_path / "loss.png", plot(page, "Loss"))
        assert all(pixels(loss, colour) > 60 for colour in colours), width  # training and validation


def test_a_click_in_the_legend_hides_its_line_and_the_axis_and_scale_can_be_chosen(browser, one, artifacts, tmp_path):
    page = opened(browser, one, artifacts)
    loss = plot(page, "Loss")
    before = pixels(page.screenshot(tmp_path / "a.png", loss), BLUE)
    page.evaluate(f"document.querySelector('{loss}').closest('.panel').querySelector('.legend button').click()")
    page.wait("document.body.dataset.drawn === '2'")
    after = pixels(page.screenshot(tmp_path / "b.png", loss), BLUE)
    assert before > 100 and after == 0

    labels = "Bokeh.documents[0].roots().map((figure) => [...figure.xaxis][0].axis_label)"
    assert "step" in page.evaluate(labels)
    page.evaluate("document.querySelector('[data-value=time]').click()")
    page.wait("document.body.dataset.drawn === '3'")
    assert "time (s)" in page.evaluate(labels) and "step" not in page.evaluate(labels)
    page.evaluate("document.querySelector('[data-value=log]').click()")
    page.wait("document.body.dataset.drawn === '4'")
    assert page.evaluate("Bokeh.documents[0].roots().some((figure) => [...figure.yaxis][0].type === 'LogAxis')")
    assert page.problems == []


def test_a_broken_page_is_noticed(browser, one, tmp_path):
    """The checks of this file can fail: a script that throws, and a picture from elsewhere."""
    broken = tmp_path / "broken.html"
    broken.write_text(
        one.read_text().replace(
            "  draw();\n})();", '  new Image().src = "https://example.org/x.png"; undefined.x;\n})();'
        )
    )
    page = browser.open(broken)
    page.wait("document.readyState === 'complete'")
    assert any("TypeError" in problem for problem in page.problems)
    assert any("Content Security Policy" in problem for problem in page.problems)


def test_several_runs_are_drawn_over_each_other_with_their_scaling(browser, artifacts, tmp_path):
    runs = [
        write_run(tmp_path / f"digits-{world}", world_size=world, rate=rate, seed=world, settings={"nproc_per_node": world})
        for world, rate in ((1, 500.0), (2, 930.0), (4, 1600.0))
    ]  # fmt: skip
    file = write_report(runs, tmp_path / "compare.html")
    for width in (1280, 390):
        page = opened(browser, file, artifacts, width=width)
        for title in ("Loss", "Time of an update"):
            picture = page.screenshot(tmp_path / "plot.png", plot(page, title))
            assert all(pixels(picture, colour) > 60 for colour in (BLUE, RED, GREEN)), (title, width)
        scaling = page.screenshot(tmp_path / "scaling.png", plot(page, "Scaling"))
        assert pixels(scaling, BLUE) > 100 and pixels(scaling, GREY) > 30  # measured, and what would be linear


def test_many_long_curves_are_drawn_in_one_plot(browser, one, artifacts, tmp_path):
    """Sixty trials of thousands of steps each: more numbers than a call of a function takes."""
    text = one.read_text()
    begin = text.index('id="page-data">') + len('id="page-data">')
    end = text.index("</script>", begin)
    data = json.loads(text[begin:end])
    line = data["panels"][0]["lines"][0]
    longer = {name: values * math.ceil(150_000 / len(values)) for name, values in line["data"].items()}
    data["panels"] = [{**data["panels"][0], "lines": [{**line, "data": longer}]}]
    (tmp_path / "many.html").write_text(text[:begin] + json.dumps(data).replace("<", "\\u003c") + text[end:])
    opened(browser, tmp_path / "many.html", artifacts)


def test_a_sweep_is_drawn(browser, artifacts, tmp_path):
    file = write_report([write_sweep(tmp_path / "sweep", with_runs=4)], tmp_path / "sweep.html")
    page = opened(browser, file, artifacts)
    for title, colour in (
        ("Trials", RED),
        ("Curves of the trials", GREY),
        ("Parameters", RED),
        ("Importance of the parameters", BLUE),
    ):
        picture = page.screenshot(tmp_path / "plot.png", plot(page, title))
        assert pixels(picture, colour) > 60, title
    opened(browser, file, artifacts, width=390, dark=True)


def test_long_names_leave_room_for_what_they_name(browser, artifacts, tmp_path):
    sweep = write_sweep(tmp_path / "sweep")
    long = "optimizer.groups.of_the_head.learning_rate_at_the_start"
    (sweep / "sweep.json").write_text((sweep / "sweep.json").read_text().replace('"learning_rate"', f'"{long}"'))
    page = opened(browser, write_report([sweep], tmp_path / "names.html"), artifacts, width=390)
    importance = page.screenshot(tmp_path / "importance.png", plot(page, "Importance of the parameters"))
    assert pixels(importance, BLUE) > 1000
    run = write_run(tmp_path / ("a-metric" * 3))
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines.replace('"accuracy"', f'"{"x" * 150}"'))
    opened(browser, write_report([run], tmp_path / "metric.html"), artifacts, width=390)


def test_a_run_of_100000_log_lines_opens_fast_and_shows_its_spike(browser, artifacts, tmp_path):
    run = write_run(tmp_path / "run", steps=100_000, every=1, spikes={34_567: 50.0})
    file = write_report([run], tmp_path / "long.html")
    assert file.stat().st_size < 5e6
    page = opened(browser, file, artifacts)
    assert page.cpu_s() < 2.0
    plot_of_loss = plot(page, "Loss")
    page.screenshot(tmp_path / "loss.png", plot_of_loss)
    with Image.open(tmp_path / "loss.png") as picture:
        upper = picture.convert("RGB").crop((70, 0, picture.width, picture.height // 3))
        upper.save(tmp_path / "upper.png")
    assert 20 < pixels(tmp_path / "upper.png", BLUE) < 400  # one thin line up to 50; the rest lies below 3
