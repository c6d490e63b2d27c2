"""Whatever stands in a file of a run, its reader reads it or raises an error of this package, within two seconds."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from distributed.checkpoints.manifest import _SEAL, MANIFEST, STATE, manifest_of
from distributed.checkpoints.shards import read_tensors
from distributed.checkpoints.state_file import read_state
from distributed.cli.__main__ import main
from distributed.config.merging import read_config_file
from distributed.errors import DistributedError
from distributed.report.figures import differences
from distributed.report.runs import read_run
from distributed.report.sweep import read_sweep
from distributed.report.tables import run_page
from distributed.runs.recorded import read_recorded
from distributed.tuning.space import read_space
from distributed.tuning.sweep import Sweep, open_sweep
from tests.unit.hostile_files import sealed, write_checkpoint
from tests.unit.report_files import write_run, write_sweep

HOSTILE = [
    10**18,
    -1,
    10**299,
    -(10**299),
    1.7e308,
    float("inf"),
    float("nan"),
    10**400,
    0,
    2**53 + 1,
    "\x1b[2J",
    "\ud800",
    "\0",
    "../x",
    {},
    [],
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(HOSTILE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FEW_AND_MANY = pytest.mark.parametrize("examples", [30, pytest.param(300, marks=pytest.mark.full)])


@st.composite
def changed(draw: st.DrawFn, content: Any) -> Any:
    """JSON like `content`, with another value in one to three places."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        holder = content
        while True:
            places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not places:
                break
            place = draw(st.sampled_from(places))
            if isinstance(holder[place], (dict, list)) and holder[place] and draw(st.integers(0, 3)):
                holder = holder[place]
                continue
            how = draw(st.sampled_from(["value", "value", "value", "remove", "add"]))
            if how == "remove":
                del holder[place]
            elif how == "add" and isinstance(holder, dict):
                holder[draw(st.text(max_size=5))] = draw(VALUES)
            else:
                holder[place] = draw(VALUES)
            break
    return content


@st.composite
def damaged(draw: st.DrawFn, raw: bytes) -> bytes:
    """`raw` cut off, with flipped bits or with other bytes in it."""
    how = draw(st.sampled_from(["cut", "flip", "insert"]))
    place = draw(st.integers(0, max(len(raw) - 1, 0)))
    if how == "cut":
        return raw[:place]
    if how == "flip":
        return raw[:place] + bytes([raw[place] ^ 1 << draw(st.integers(0, 7))]) + raw[place + 1 :]
    return (
        raw[:place]
        + draw(st.binary(max_size=8) | st.sampled_from([b"[" * 200, b"1e999", b"9" * 400, b"*a", b"&a "]))
        + raw[place:]
    )


def raw_json(content: Any) -> bytes:
    return json.dumps(content, indent=1).encode()


def raw_yaml(content: Any) -> bytes:
    return yaml.safe_dump(content, allow_unicode=True).encode(errors="surrogatepass")


def raw_lines(content: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in content)


def fuzz(
    examples: int, content: Any, raw: Callable[[Any], bytes], read: Callable[[bytes], Any], *, refuses: bool = True
) -> None:
    """Call `read` with variants of `content`. At least one of them must be read, and one refused, or none without `refuses`."""
    ends = {"read": 0, "refused": 0}

    @settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(changed(content).map(raw) | damaged(raw(content)))
    def check(variant: bytes) -> None:
        began, end, message = time.process_time(), "read", ""
        try:
            read(variant)
        except DistributedError as raised:
            end, message = "refused", str(raised)
        ends[end] += 1
        assert "\n" not in message
        assert time.process_time() - began < 2

    read(raw(content))
    check()
    assert ends["read"] and bool(ends["refused"]) is refuses, ends


def plainly(*arguments: Any) -> None:
    """Run a command. Raise DistributedError if it fails, AssertionError if it prints a control character."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        main(list(map(str, arguments)))
    assert (out.getvalue() + err.getvalue()).replace("\n", "").isprintable()
    if end.value.code:
        raise DistributedError(err.getvalue().strip())


@FEW_AND_MANY
def test_manifest(tmp_path: Path, examples: int) -> None:
    body = (write_checkpoint(tmp_path / "step-00000004") / MANIFEST).read_bytes().rpartition(_SEAL)[0]

    def read(raw: bytes) -> None:
        manifest = manifest_of("here", sealed(raw.removesuffix(b"\n}")))
        assert manifest.total_bytes >= 0 and manifest.step + manifest.samples_in_epoch < 2**54

    fuzz(examples, json.loads(body + b"\n}"), raw_json, read)


@FEW_AND_MANY
def test_checkpoint_list(tmp_path: Path, examples: int) -> None:
    path = write_checkpoint(tmp_path / "checkpoints" / "step-00000004")
    body = (path / MANIFEST).read_bytes().rpartition(_SEAL)[0]

    def read(raw: bytes) -> None:
        (path / MANIFEST).write_bytes(sealed(raw.removesuffix(b"\n}")))
        plainly("checkpoint", "list", tmp_path)
        plainly("checkpoint", "verify", path)

    fuzz(examples, json.loads(body + b"\n}"), raw_json, read)


@FEW_AND_MANY
def test_state(tmp_path: Path, examples: int) -> None:
    content = json.loads((write_checkpoint(tmp_path / "step-00000004") / STATE).read_bytes())

    def read(raw: bytes) -> None:
        (tmp_path / STATE).write_bytes(raw)
        state, extra = read_state(tmp_path)
        assert state.step >= 0 and 0 <= state.samples_in_epoch <= state.samples_seen and isinstance(extra, dict)
        assert all(row["step"] is not None for row in state.rows)

    fuzz(examples, content, raw_json, read)


@FEW_AND_MANY
def test_tensors(tmp_path: Path, examples: int) -> None:
    pieces = json.dumps({"a": {"saved_offsets": [0, 0]}, "b": {"saved_offsets": [2]}})
    header = {
        "__metadata__": {"DCP_SHARDING_INFO": pieces, "aliases": '{"c": "a"}'},
        "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [8, 12]},
    }

    def read(raw: bytes) -> None:
        (tmp_path / "a.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(12))
        for tensor in read_tensors(tmp_path)[0].values():
            assert len(tensor.read()) <= 12

    header["__metadata__"]["DCP_SHARDING_INFO"] = pieces.replace("[2]", "[0]")
    fuzz(examples, header, raw_json, read)


@FEW_AND_MANY
def test_config(tmp_path: Path, examples: int) -> None:
    content = yaml.safe_load((write_run(tmp_path / "run") / "config.yaml").read_text())
    content |= {"ddp": {"bucket_cap_mb": 5}, "betas": [0.9, 0.99], "hyperparameters": {"width": 3}}
    file = tmp_path / "config.yaml"

    def read(raw: bytes) -> None:
        file.write_bytes(raw)
        read_config_file(file)
        read_recorded(file)

    fuzz(examples, content, raw_yaml, read)


@FEW_AND_MANY
def test_search_space(tmp_path: Path, examples: int) -> None:
    file = tmp_path / "space.yaml"

    def read(raw: bytes) -> None:
        file.write_bytes(raw)
        read_space(file)

    fuzz(
        examples,
        {"lr": {"loguniform": [0.001, 0.1]}, "batch_size": [16, 32], "layers": {"randint": [1, 4]}},
        raw_yaml,
        read,
    )


@FEW_AND_MANY
def test_sweep_yaml(tmp_path: Path, examples: int) -> None:
    configuration = {"search": "random", "num_samples": 4, "search_space": {"lr": [1, 2]}}
    content = {"metric": "loss", "mode": "min", **configuration}

    def read(raw: bytes) -> None:
        (tmp_path / "sweep.yaml").write_bytes(raw)
        open_sweep(tmp_path, "loss", "min", configuration, True).run.unlock()

    fuzz(examples, content, raw_yaml, read)


@FEW_AND_MANY
def test_journal_of_a_sweep(tmp_path: Path, examples: int) -> None:
    lines = [
        {"trial": 0, "event": "started", "time": 1.0, "config": {"lr": 0.1}},
        {"trial": 0, "event": "row", "time": 2.0, "row": {"epoch": 1, "loss": 0.5}, "cloned": None},
        {"trial": 0, "event": "ended", "time": 3.0, "status": "failed", "error": "no memory"},
    ]

    def read(raw: bytes) -> None:
        (tmp_path / "trials.jsonl").write_bytes(raw)
        sweep = Sweep(tmp_path, "loss", "min")
        sweep.read()
        sweep.write()
        assert sweep.trial_hours < 1e13 and (sweep.best() is None or sweep.best().number >= 0)

    fuzz(examples, lines, raw_lines, read, refuses=False)  # a line of a journal is left out


@FEW_AND_MANY
def test_sweep_json(tmp_path: Path, examples: int) -> None:
    content = json.loads((write_sweep(tmp_path / "sweep", trials=2) / "sweep.json").read_bytes())

    def read(raw: bytes) -> None:
        (tmp_path / "sweep" / "sweep.json").write_bytes(raw)
        sweep = read_sweep(tmp_path / "sweep")
        assert len(sweep.done) <= len(sweep.trials) and isinstance(sweep.varied, list)

    fuzz(examples, content, raw_json, read)


@FEW_AND_MANY
@pytest.mark.parametrize("name", ["result.json", "events.jsonl", "metrics.jsonl", "times.jsonl", "config.yaml"])
def test_commands_on_a_run(tmp_path: Path, name: str, examples: int) -> None:
    one, other = (write_run(tmp_path / "runs" / each, steps=20, every=10) for each in "ab")
    (other / "config.yaml").write_text((other / "config.yaml").read_text().replace("epochs: 5", "epochs: 6"))
    raw = (one / name).read_text()
    content = (
        list(map(json.loads, raw.splitlines())) if name.endswith("l") and "yaml" not in name else yaml.safe_load(raw)
    )
    write = raw_yaml if "yaml" in name else raw_lines if name.endswith("jsonl") else raw_json

    def read(variant: bytes) -> None:
        (one / name).write_bytes(variant)
        plainly("runs", tmp_path / "runs")
        plainly("status", "--once", one)
        plainly("why", one)
        plainly("compare", one, other)
        plainly("compare", one, other, "--json")
        run = read_run(one)
        run_page(run).encode(errors="backslashreplace")
        differences([run, read_run(other)])

    is_journal = name in ("events.jsonl", "times.jsonl")  # a line of which is left out
    fuzz(max(examples // 3, 8), content, write, read, refuses=not is_journal)
