"""report.html: what is read of a run, what is drawn of it, and what is refused. No browser: see test_report_in_browser.py."""

from __future__ import annotations

import html
import json
import math
import random
import re

import pytest

from distributed.errors import ConfigError, ResourceError
from distributed.report import page as page_module
from distributed.report import report_text, write_report, write_reports_at_end
from distributed.report.curves import STRETCHES, thinned
from distributed.report.figures import figures
from distributed.report.panels import mean_times, run_panels, scaling_panels
from distributed.report.runs import labels, read_run
from distributed.report.sweep import read_sweep, sweep_panels
from distributed.runs.directory import RunDirectory
from tests.unit.report_files import BEGAN, write_lines, write_run, write_sweep


def panel(panels, title):
    (found,) = [each for each in panels if each.title == title]
    return found


def line(panels, title, name):
    (found,) = [each for each in panel(panels, title).lines if each.name == name]
    return found


def data_of(text):
    """What the page gives to its script."""
    return json.loads(re.search(r'id="page-data">(.*?)</script>', text, re.S).group(1))


# ------------------------------------------------------------------ long curves


def test_every_extreme_survives_thinning_at_its_place():
    noise = random.Random(0)
    values = [noise.random() for _ in range(100_000)]
    values[31_337], values[77_777] = 50.0, -7.0
    kept = thinned(values)

    assert len(kept) <= 2 * STRETCHES + 2 and kept == sorted(set(kept))
    assert {0, 31_337, 77_777, 99_999} <= set(kept)
    for start in range(0, 100_000, 100):  # each stretch keeps both of its ends
        part = values[start : start + 100]
        drawn = [values[each] for each in kept if start <= each < start + 100]
        assert min(drawn) == min(part) and max(drawn) == max(part)


@pytest.mark.parametrize("count", [0, 1, 2000, 2001, 2999, 3001])
def test_thinning_takes_any_length(count):
    values = [float(number % 7) for number in range(count)]
    kept = thinned(values)

    assert kept[:1] == [0][:count] and kept[-1:] == [count - 1][: min(count, 1)]
    assert len(kept) == (count if count <= 2 * STRETCHES else len(set(kept))) and len(kept) <= max(count, 1)


def test_a_value_that_is_not_finite_stays_as_a_gap_and_is_counted(tmp_path):
    run = write_run(tmp_path / "run", steps=5000, every=1, spikes={2500: None})  # as MetricsFile writes a NaN
    panels = run_panels([read_run(run)])
    drawn = line(panels, "Loss", "train").data

    assert drawn["y"][drawn["step"].index(2500)] is None
    assert panel(panels, "Loss").caption.startswith("1 value not finite")


# ------------------------------------------------------------------ one run


def test_curves_are_those_of_the_files(tmp_path):
    run = write_run(tmp_path / "run", steps=100, every=10)
    rows = [json.loads(each) for each in (run / "metrics.jsonl").read_text().splitlines()]
    panels = run_panels([read_run(run)])

    for split, name in (("train", "train"), ("val", "validation")):
        drawn = line(panels, "Loss", name).data
        own = [row for row in rows if row["split"] == split]
        assert drawn["step"] == [row["step"] for row in own]
        assert drawn["y"] == pytest.approx([row["loss"] for row in own], rel=1e-5)
        assert drawn["time"] == pytest.approx([row["time"] - BEGAN for row in own])
    titles = [each.title for each in panels]
    assert titles == [
        "Loss", "Accuracy", "Events", "Throughput", "Time of an update", "Time of each rank", "Learning rate", "Gradient norm",
    ]  # fmt: skip


def test_shares_of_the_time_are_means_over_updates_not_over_log_lines(tmp_path):
    run = write_run(tmp_path / "run")
    parts = {"compute_s": 0.0, "communication_s": 0.0, "checkpoint_s": 0.0}
    rows = [{"step": 90, "data_s": 0.010, **parts}, {"step": 100, "data_s": 0.110, **parts}]
    write_lines(run / "times.jsonl", [{"time": BEGAN, "epoch": 0, **row} for row in rows])

    assert mean_times(read_run(run))["data_s"] == pytest.approx((90 * 0.010 + 10 * 0.110) / 100)


def test_a_run_that_began_at_a_checkpoint_of_another_counts_its_own_updates(tmp_path):
    run = write_run(tmp_path / "run")
    first = {"time": BEGAN, "event": "started", "step": 5000, "restart_count": 0}
    write_lines(run / "events.jsonl", [first, {**first, "time": BEGAN + 1, "step": 5090, "restart_count": 1}])
    rows = [{"step": 5090, "data_s": 0.010}, {"step": 5100, "data_s": 0.110}]
    write_lines(run / "times.jsonl", [{"time": BEGAN, "epoch": 0, **row} for row in rows])

    assert mean_times(read_run(run))["data_s"] == pytest.approx((90 * 0.010 + 10 * 0.110) / 100)


def test_the_slowest_rank_is_named_with_how_far_it_is_behind(tmp_path):
    few = panel(run_panels([read_run(write_run(tmp_path / "few", world_size=3, slow_rank=1.5))]), "Time of each rank")
    many = panel(
        run_panels([read_run(write_run(tmp_path / "many", world_size=32, slow_rank=1.5))]), "Time of each rank"
    )

    two = panel(run_panels([read_run(write_run(tmp_path / "two", slow_rank=1.5))]), "Time of each rank")

    assert "slowest: rank 1, 1.50 x the other" in two.caption and "slowest: rank 1, 1.50 x the median" in few.caption
    assert "slowest: rank 1, 1.50 x" in many.caption
    assert [each.name for each in few.lines] == ["rank 0", "rank 1", "rank 2"]
    assert len(many.lines) == 4 and many.lines[0].name == "rank 1" and many.lines[3].name == "median of 32 ranks"


def test_events_stand_where_training_was_also_those_that_do_not_say(tmp_path):
    killed = {"time": BEGAN + 8.95, "event": "worker_failed", "rank": 1, "cause": "rank 1 was killed by SIGKILL"}
    resumed = {"time": BEGAN + 10, "event": "resumed", "step": 300, "checkpoint": "step-00000300"}
    run = read_run(write_run(tmp_path / "run", steps=1000, every=10, events=[killed, resumed]))
    panels = run_panels([run])

    failed = line(panels, "Events", "worker failed").data
    assert failed["step"] == [390]  # the last log line before second 8.95
    assert failed["text"] == ["worker failed: rank 1 was killed by SIGKILL"]
    marks = [(mark["step"], mark["text"]) for mark in panel(panels, "Loss").marks]
    assert marks == [(390, "worker failed"), (300, "resumed")]


def test_the_restarts_of_a_run_are_counted_without_changes_of_the_number_of_processes(tmp_path):
    names = ("worker_failed", "restarted", "resumed", "regrouped", "resumed", "worker_failed", "restarted", "resumed")
    events = [{"time": BEGAN + 5 + number, "event": name} for number, name in enumerate(names)]
    run, undisturbed = write_run(tmp_path / "run", events=events), write_run(tmp_path / "undisturbed")

    assert [figures(read_run(path))["restarts"] for path in (run, undisturbed)] == ["2", "0"]
    assert re.search(r"<dt>restarts</dt>\s*<dd[^>]*>2</dd>", report_text([run]))


def test_a_change_of_the_number_of_processes_names_the_new_number(tmp_path):
    names = (
        ("regrouped", {"world_size": 1}),
        ("started", {"world_size": 2}),
        ("regrouped", {}),
        ("started", {"world_size": 3}),
    )
    events = [{"time": BEGAN + 5 + number, "event": name, **sizes} for number, (name, sizes) in enumerate(names)]
    run = write_run(tmp_path / "run", events=events)

    assert [each["world_size"] for each in read_run(run).events if each["event"] == "regrouped"] == [2, 3]
    assert re.search(r"number of processes changed</td>\s*<td[^>]*>world_size 2<", report_text([run]))


def test_ranks_and_events_of_several_nodes_name_their_node(tmp_path):
    killed = {"time": BEGAN + 5, "event": "worker_failed", "rank": 3, "node": 1, "cause": "rank 3 on node 1 was killed"}
    lost = {"time": BEGAN + 6, "event": "node_lost", "node": 1, "cause": "node 1 has ended"}
    joined = {"time": BEGAN + 7, "event": "node_joined", "node": 1, "host": "node1, 10.99.0.2"}
    run = read_run(write_run(tmp_path / "run", world_size=4, num_nodes=2, slow_rank=1.5, events=[killed, lost, joined]))
    panels = run_panels([run])

    ranks = panel(panels, "Time of each rank")
    assert [each.name for each in ranks.lines] == [f"rank {rank}, node {rank // 2}" for rank in range(4)]
    assert "slowest: rank 1, node 0, 1.50 x" in ranks.caption
    rows = panel(panels, "Events").more["rows"]
    assert rows == ["started", "checkpoint", "node 1: worker failed", "node 1: lost", "node 1: joined"]
    assert line(panels, "Events", "node 1: joined").data["text"] == ["node joined: node1, 10.99.0.2"]
    assert [mark["text"] for mark in panel(panels, "Loss").marks] == ["worker failed", "node lost", "node joined"]
    assert ">4 on 2 nodes<" in report_text([run.path])
    uneven = read_run(write_run(tmp_path / "uneven", world_size=3, num_nodes=2, slow_rank=1.5))
    assert [each.name for each in panel(run_panels([uneven]), "Time of each rank").lines] == [
        "rank 0",
        "rank 1",
        "rank 2",
    ]


def test_a_half_line_and_foreign_lines_are_left_out(tmp_path):
    run = write_run(tmp_path / "run", steps=100, every=10)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '[1, 2]\n"text"\n{"step": 7}\n\xff\n{"step": null, "time": 17}\n{"step": "8", "time": 17}\n{"step": 9, "time": NaN}\n'
        )
        file.write('{"step": 110, "time": 17')
    with (run / "events.jsonl").open("a") as file:
        file.write('{"time": 1')

    (run / "result.json").write_text("[1]")

    assert [row["step"] for row in read_run(run).train] == list(range(10, 101, 10))
    assert ">unknown<" in report_text([run])


def test_what_a_user_wrote_cannot_become_markup(tmp_path):
    nasty = "<!--<script></script><img src=x onerror=alert(1)>"
    events = [{"time": BEGAN + 5, "event": "worker_failed", "rank": 0, "cause": nasty}]
    text = report_text([write_run(tmp_path / "run", settings={"monitor": nasty}, events=events)])

    outside = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert "<img" not in outside and outside.count(html.escape(nasty)) == 2  # as a setting and in the journal
    assert data_of(text)["panels"][2]["lines"][2]["data"]["text"] == [f"worker failed: {nasty}"]


def test_a_running_and_a_killed_run_are_shown_as_they_are(tmp_path):
    run = write_run(tmp_path / "run", status="running")
    (run / "times.jsonl").unlink()
    assert ">running<" in report_text([run])
    (run / "result.json").write_text('{"status": "fai')
    (run / "config.yaml").unlink()
    text = report_text([run])
    assert ">unknown<" in text and "no config.yaml" in text


def test_a_part_of_too_many_metrics_events_and_marks_is_drawn(tmp_path):
    lost = [{"time": BEGAN + each, "event": "node_lost", "node": f"n{each % 300}"} for each in range(3000)]
    run = write_run(tmp_path / "run", steps=100, events=lost)
    row = {"step": 1, "epoch": 1, "time": BEGAN, **{f"metric_{each}": 0.5 for each in range(250)}}
    write_lines(run / "metrics.jsonl", [row])
    panels = run_panels([read_run(run)])

    metrics = [each for each in panels if each.title.startswith("Metric ")]
    assert len(metrics) == 200 and metrics[-1].caption == "50 more metrics are not drawn" and not metrics[0].caption
    assert 100 < len(metrics[0].marks) <= 200
    events = panel(panels, "Events")
    assert (
        len(events.lines) == 200 and events.caption == "102 more kinds are not drawn"
    )  # with `started` and `checkpoint`
    text = report_text([run])
    assert "the newest 2000 of 3006 events" in text and text.count("<td>node lost</td>") == 2000


def test_a_report_has_no_more_than_16_mb_of_images(tmp_path):
    run = write_run(tmp_path / "run", steps=100)
    (run / "media").mkdir()
    medium = {"kind": "image", "step": 1, "time": BEGAN, "epoch": 0}
    names = [f"{each}.png" for each in range(10)]
    for name in names:
        (run / "media" / name).write_bytes(bytes(1_900_000))
    write_lines(
        run / "media.jsonl", [{**medium, "name": name, "path": f"media/{name}"} for name in [*names, "x" * 300]]
    )
    text = report_text([run])

    assert text.count('src="data:image/png;base64,') == 6 and text.count("the page would become too large") == 4
    assert "cannot be read (File name too long)" in text


def test_a_long_table_is_cut_between_two_rows_and_says_so(tmp_path):
    run = write_run(tmp_path / "run", steps=10)
    (run / "media").mkdir()
    medium = {"kind": "table", "step": 1, "time": BEGAN, "epoch": 0}
    for name, letters in (("long", 2000), ("short", 20)):
        rows = "".join(f"{number},{'x' * letters}\n" for number in range(60))
        (run / "media" / f"{name}.csv").write_text("row,text\n" + rows)
    write_lines(
        run / "media.jsonl", [{**medium, "name": name, "path": f"media/{name}.csv"} for name in ("long", "short")]
    )

    long, short = report_text([run]).split("<figcaption>long at step 1")

    assert "the table has further rows: see RUN/media" in long and "more rows" not in long
    assert long.count("x" * 2000) == long.count("<td>xx") == 49  # of 100,000 letters
    assert "further rows" not in short and "10 more rows" in short


def test_a_line_of_times_without_ranks_is_left_out_of_their_comparison(tmp_path):
    runs = [write_run(tmp_path / name, steps=100) for name in "ab"]
    with (runs[0] / "times.jsonl").open("a") as file:
        file.write(json.dumps({"step": 110, "time": BEGAN + 5}) + "\n")

    first, second = panel(run_panels([read_run(run) for run in runs]), "Slowest rank").lines
    assert first.data["step"] == second.data["step"] == list(range(10, 101, 10))


# ------------------------------------------------------------------ several runs


def test_scaling_is_measured_speed_over_that_of_the_smallest_world(tmp_path):
    rates = {1: 500.0, 2: 900.0, 4: 1600.0}
    runs = [read_run(write_run(tmp_path / str(world), world_size=world, rate=rate)) for world, rate in rates.items()]
    speed, efficiency = scaling_panels(runs)

    assert speed.lines[0].data == {"x": [1, 2, 4], "y": [500.0, 900.0, 1600.0]}
    assert speed.lines[1].data == {"x": [1, 2, 4], "y": [500.0, 1000.0, 2000.0]}
    assert efficiency.lines[0].data["y"] == pytest.approx([100.0, 90.0, 80.0])


def test_one_world_size_or_two_engines_are_no_scaling(tmp_path):
    first = read_run(write_run(tmp_path / "a", world_size=1, backend="x"))
    second = read_run(write_run(tmp_path / "b", world_size=2, backend="y"))

    assert scaling_panels([first, first]) == [] and scaling_panels([first, second]) == []


def test_a_comparison_shows_what_differs_and_nothing_else(tmp_path):
    slow = write_run(tmp_path / "slow", settings={"learning_rate": 0.001})
    fast = write_run(tmp_path / "fast", settings={"learning_rate": 0.00100001})
    text = report_text([slow, fast])
    rows = re.findall(r"<tr><td>(\w+)</td>(.*?)</tr>", text[text.index("Settings that differ") :])

    assert rows == [("learning_rate", "<td>0.001</td><td>0.00100001</td>")]
    assert {each["name"] for each in data_of(text)["panels"][0]["lines"]} == {"slow", "fast"}


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    assert labels([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    with pytest.raises(ConfigError, match="named twice"):
        labels([tmp_path / "a", tmp_path / "b" / ".." / "a"])


# ------------------------------------------------------------------ a sweep


def test_the_parameter_that_decides_is_the_most_important_one(tmp_path):
    panels = sweep_panels(read_sweep(write_sweep(tmp_path / "sweep", trials=40)))
    (importance,) = panel(panels, "Importance of the parameters").lines

    assert importance.data["y"][0] == "learning_rate" and importance.data["x"][0] > 0.5
    assert math.isclose(sum(importance.data["x"]), 1, rel_tol=1e-4)
    assert set(importance.data["y"]) == {"learning_rate", "batch_size", "optimizer", "dropout"}  # `layers` is always 3


def test_parallel_axes_hold_every_finished_trial_best_first(tmp_path):
    sweep = read_sweep(write_sweep(tmp_path / "sweep", trials=20))
    parallel = panel(sweep_panels(sweep), "Parameters").more

    assert [axis["name"] for axis in parallel["axes"]] == [
        "learning_rate",
        "batch_size",
        "optimizer",
        "dropout",
        "val_loss",
    ]
    assert len(parallel["trials"]) == 20  # not the one that crashed
    assert [trial["value"] for trial in parallel["trials"]] == sorted(trial["value"] for trial in parallel["trials"])
    for trial, shown in zip(sweep.done, parallel["trials"], strict=True):
        rates = [math.log10(each.config["learning_rate"]) for each in sweep.done]
        place = (math.log10(trial.config["learning_rate"]) - min(rates)) / (max(rates) - min(rates))
        assert shown["y"][0] == pytest.approx(place, abs=1e-5)  # the axis is logarithmic
        assert shown["y"][2] == (0.0 if trial.config["optimizer"] == "adam" else 1.0)


def test_a_parameter_without_an_end_is_a_word_on_its_axis(tmp_path):
    path = write_sweep(tmp_path / "sweep", trials=20)
    content = json.loads((path / "sweep.json").read_text())
    for number, trial in enumerate(content["trials"]):
        trial["config"]["gradient_clipping"] = math.inf if number % 2 else 1.0
    (path / "sweep.json").write_text(json.dumps(content))
    panels = data_of(report_text([path]))["panels"]
    (parallel,) = [each["more"] for each in panels if each["title"] == "Parameters"]

    (axis,) = [axis for axis in parallel["axes"] if axis["name"] == "gradient_clipping"]
    assert axis["ticks"] == [[0.0, "1.0"], [1.0, "inf"]]


def test_few_trials_have_no_importance_and_say_so(tmp_path):
    panels = sweep_panels(read_sweep(write_sweep(tmp_path / "sweep", trials=3)))

    assert panel(panels, "Importance of the parameters").caption == "needs 8 finished trials, and there are 3"


def test_parameters_that_a_forest_cannot_rank_in_time_are_not_ranked(tmp_path):
    path = write_sweep(tmp_path / "sweep", trials=10)
    content = json.loads((path / "sweep.json").read_text())
    for number, trial in enumerate(content["trials"]):
        trial["config"] |= {f"other_{each}": number for each in range(60)} | {"text": f"{number}{'x' * 5000}"}
        trial["run_dir"] = "x" * 300  # which no directory can have as its name
    (path / "sweep.json").write_text(json.dumps(content))
    sweep = read_sweep(path)

    importance = panel(sweep_panels(sweep), "Importance of the parameters")
    assert importance.caption == "needs 50 parameters or fewer, and there are 65"
    assert {len(trial.config["text"]) for trial in sweep.trials} == {1000}


def test_a_sweep_of_a_maximum_has_its_largest_first(tmp_path):
    sweep = write_sweep(tmp_path / "sweep")
    content = json.loads((sweep / "sweep.json").read_text())
    (sweep / "sweep.json").write_text(json.dumps(content | {"mode": "max"}))
    done = read_sweep(sweep).done

    assert [trial.value for trial in done] == sorted((trial.value for trial in done), reverse=True)


# ------------------------------------------------------------------ what is refused


def refused(paths):
    with pytest.raises(ConfigError) as error:
        report_text(paths)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_no_run_is_one_line_with_the_way_out(tmp_path):
    run = write_run(tmp_path / "runs" / "one")
    assert "does not exist" in refused([tmp_path / "none"])
    assert "is not a directory" in refused([run / "metrics.jsonl"])
    assert f"it contains runs, such as {str(run)!r}" in refused([tmp_path / "runs"])
    (tmp_path / "empty").mkdir()
    assert "is not a run directory" in refused([tmp_path / "empty"])
    (run / "metrics.jsonl").write_text('{"step": 1, "ti')
    assert "has no metrics yet" in refused([run])
    (run / "metrics.jsonl").unlink()
    assert "has no metrics: only runs of a Trainer" in refused([run])
    (run / ".part").write_text("node 1 of a run of node0\n")
    text = (
        "has no metrics, only the logs of node 1 of a run of node0: run this command on node 0, which has the metrics"
    )
    assert refused([run]).endswith(text)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "times.jsonl").unlink()
    (run / "times.jsonl").mkdir()
    assert "cannot be read (Is a directory)" in refused([run])


def test_a_damaged_config_or_sweep_is_one_line(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "config.yaml").write_text("a: [1")
    assert "config.yaml' cannot be read (it is not YAML)" in refused([run])
    sweep = write_sweep(tmp_path / "sweep")
    assert "is a sweep" in refused([sweep, run])
    for content in ("[1]", '{"metric": "loss"}', "{"):
        (sweep / "sweep.json").write_text(content)
        assert "does not have the form in which a sweep writes it" in refused([sweep])
    (sweep / "sweep.json").write_text('{"metric": "loss", "mode": "min", "trials": []}')
    assert "has no trials yet" in refused([sweep])


# ------------------------------------------------------------------ at the end of a run


def test_every_trainer_of_a_script_gets_a_report_and_one_without_metrics_none(tmp_path):
    run = RunDirectory(write_run(tmp_path / "run"))
    write_run(run.path / "fit-2")
    (run.path / "fit-3").mkdir()
    said = []
    write_reports_at_end(run, said.append)

    found = sorted(path.relative_to(run.path).as_posix() for path in run.path.rglob("report.html"))
    assert (said, found) == ([], ["fit-2/report.html", "report.html"])


def test_without_bokeh_a_run_says_so_once_and_goes_on(tmp_path, monkeypatch):
    run = RunDirectory(write_run(tmp_path / "run"))
    write_run(run.path / "fit-2")
    monkeypatch.setattr(page_module.importlib.util, "find_spec", lambda name: None)
    said = []
    write_reports_at_end(run, said.append)

    assert len(said) == 1 and "pip install 'distributed-trainer[report]'" in said[0]
    with pytest.raises(ResourceError, match=r"distributed-trainer\[report\]"):
        report_text([run.path])


def test_a_report_that_cannot_be_made_fails_no_run(tmp_path):
    run = RunDirectory(write_run(tmp_path / "run"))
    (run.path / "config.yaml").write_text("a: [1")
    (run.path / "report.html").write_text("old")
    said = []
    write_reports_at_end(run, said.append)

    assert len(said) == 1 and "config.yaml" in said[0]
    assert (run.path / "report.html").read_text() == "old"


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    run = write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([run], tmp_path / "none" / "report.html")


def test_the_page_loads_nothing_and_a_long_run_stays_small(tmp_path):
    output = write_report([write_run(tmp_path / "run", steps=100_000, every=1)], tmp_path / "report.html")
    text = output.read_text()

    assert output.stat().st_size < 2.5e6
    assert "default-src 'none'" in text
    assert re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?!data:)', text) == []
