"""Files that somebody wrote to harm their reader. Run as a program, it reads each of them within a limit of memory.

The files of `CASES` are to be refused. Those of `FULL` are just within the limits, so that they are read or refused.
For each case it prints a line of JSON: the name, the kind of the error and its message, and the seconds of CPU time.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from distributed.checkpoints.digests import FileRecord, file_digest
from distributed.checkpoints.manifest import (
    _SEAL,
    MANIFEST,
    STATE,
    Manifest,
    list_checkpoints,
)
from distributed.checkpoints.state_file import read_state, write_state
from distributed.checkpoints.tensor_file import RawTensor, read_raw, write_tensors
from distributed.checkpoints.verifying import verify
from distributed.cli.__main__ import main as command
from distributed.config.json_lines import JOURNAL, MAX_LINE_BYTES, METRICS
from distributed.config.merging import read_config_file
from distributed.config.reading import MAX_CONTAINERS, MAX_JSON_BYTES, MAX_RECORD_BYTES, MAX_VALUES, MAX_WIDE_BYTES
from distributed.errors import ConfigError
from distributed.report.sweep import read_sweep
from distributed.runs.directory import RunDirectory
from distributed.runs.listing import read_state_of
from distributed.runs.recorded import read_recorded
from distributed.runs.summary import MAX_METRICS, read_result
from distributed.state import TrainState
from distributed.tuning.sweep import Sweep, open_sweep
from tests.unit.report_files import write_run, write_sweep

MEMORY_BYTES = 200 << 20
SECONDS = 2.0  # of CPU time, for one file
Edit = Callable[[str], str]


def write_checkpoint(path: Path, *, manifest: Edit = str, state: Edit = str) -> Path:
    """Write a small checkpoint whose files a forger has edited and sealed again."""
    (path / "model").mkdir(parents=True)
    weights = [RawTensor("weight", "F32", (2,), lambda: bytes(8))]
    write_tensors(path / "model" / "model.safetensors", weights, {"format": "pt"})
    train = TrainState(
        step=4, epoch=1, samples_in_epoch=8, samples_seen=40, metrics={"loss": 0.5}, rows=[{"step": 4, "epoch": 1, "loss": 0.5}],
        epoch_sums={"loss": [1.0, 8.0]}, train_time_s=1.5, fit_starts=[[0, 0]], callbacks={"Mine": {"best": 0.5, "seen": (1, 2)}},
    )  # fmt: skip
    write_state(path, train, {"world_size": 1, "step": 4, "optimizer": {"lr": 0.1}})
    text = (path / STATE).read_text()
    if (edited := state(text)) != text:
        (path / STATE).write_text(edited)
    return seal(path, manifest)


def seal(path: Path, manifest: Edit = str) -> Path:
    """Write the manifest of the files that are there."""
    files = {
        str(each.relative_to(path)): each
        for each in sorted(path.rglob("*"))
        if each.is_file() and each.name != MANIFEST
    }
    records = {name: FileRecord(each.stat().st_size, file_digest(each)) for name, each in files.items()}
    plain = Manifest(
        4,
        1,
        40,
        8,
        "single",
        1,
        1,
        "2026-01-01T00:00:00",
        "val_loss",
        "min",
        0.5,
        {"epochs": 3},
        {"python": "3"},
        records,
    )
    (path / MANIFEST).write_bytes(sealed(manifest(plain.to_bytes().rpartition(_SEAL)[0].decode())))
    return path


def sealed(body: str | bytes) -> bytes:
    """Return the content of a manifest with a right digest of itself."""
    raw = body if isinstance(body, bytes) else body.encode()
    return raw + _SEAL + xxhash.xxh3_128_hexdigest(raw).encode() + b'"\n}\n'


def _put(old: str, new: str) -> Edit:
    def edit(text: str) -> str:
        assert old in text, old
        return text.replace(old, new, 1)

    return edit


def _in_manifest(old: str, new: str) -> Callable[[Path], None]:
    return lambda path: verify(write_checkpoint(path / "step-00000004", manifest=_put(old, new)))


def _in_state(old: str, new: str) -> Callable[[Path], None]:
    return lambda path: read_state(write_checkpoint(path, state=_put(old, new)))


def _header(content: bytes) -> Callable[[Path], Any]:
    def read(path: Path) -> None:
        file = path / "x.safetensors"
        file.write_bytes(len(content).to_bytes(8, "little") + content)
        read_raw(file)

    return read


def _deep_directories(path: Path) -> None:
    write_checkpoint(path / "step-00000004")
    (path / "step-00000004" / "/".join("a" * 300)).mkdir(parents=True)
    verify(path / "step-00000004")


def _pipe(path: Path) -> None:
    os.mkfifo(path / "config.yaml")
    read_recorded(path / "config.yaml")


def _config(text: str) -> Callable[[Path], Any]:
    def read(path: Path) -> None:
        (path / "config.yaml").write_text(text)
        read_config_file(path / "config.yaml")

    return read


def _recorded(text: str) -> Callable[[Path], Any]:
    def read(path: Path) -> None:
        (path / "config.yaml").write_text(text)
        read_recorded(path / "config.yaml")

    return read


def _sweep_yaml(text: str) -> Callable[[Path], Any]:
    def read(path: Path) -> None:
        (path / "sweep.yaml").write_text(text)
        (path / "trials.jsonl").write_text("")
        open_sweep(path, "loss", "min", {"num_samples": 4}, True)

    return read


def _written(name: str, text: str | int, read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Return a function that writes the file `name`, or gives it so many bytes of zeros, and reads it."""

    def write_and_read(path: Path) -> None:
        if isinstance(text, int):
            (path / name).touch()
            os.truncate(path / name, text)
        else:
            (path / name).write_text(text)
        read(path)

    return write_and_read


def _result(text: str) -> Callable[[Path], Any]:
    return _written("result.json", text, lambda path: read_result(path / "result.json"))


def _sweep_json(text: str) -> Callable[[Path], Any]:
    return _written("sweep.json", text, read_sweep)


def _events(path: Path) -> Any:
    return RunDirectory(path).read_events()


def _journal(path: Path) -> None:
    Sweep(path, "loss", "min").read()


DEEP = "[" * 1200 + "]" * 1200
GROUPS = "[" + "[]," * 2_000_000 + "[]]"
TENSORS = ",".join(f'"{i:x}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(400_000))
MANY_BYTES, MANY_DIGESTS = ",".join(["1"] * 400_000), ",".join(['""'] * 400_000)
NUMBERS = "[" + "0," * 2_000_000 + "0]"
NOTES = ",".join(f'"{i:x}":""' for i in range(600_000))
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join(f'*{before}' for _ in range(9))}]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True)
)
LONG_TEXT = f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 10_000)}]\n"
TRIAL = '{"id": "1", "config": {"lr": %s}, "metrics": {"loss": %s}}'
SWEEP = f'{{"metric": "loss", "mode": "min", "trials": [{TRIAL}]}}'

# Name -> (function that writes and reads the file in an empty directory, what the message says).
CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "manifest: bytes 1e999": (_in_manifest('"bytes": 136', '"bytes": 1e999'), "manifest.json has the number 1e999"),
    "manifest: infinite bytes": (_in_manifest('"bytes": 136', '"bytes": Infinity'), "bytes=inf, which is not a whole number"),
    "manifest: negative bytes": (_in_manifest('"bytes": 136', '"bytes": -1'), "bytes=-1"),
    "manifest: 400 digits": (_in_manifest('_value": 0.5', '_value": ' + "9" * 400), "manifest.json has a number of 400 digits"),
    "manifest: 5000 digits": (_in_manifest('_value": 0.5', '_value": ' + "9" * 5000), "manifest.json has a number of 5000 digits"),
    "manifest: negative step": (_in_manifest('"step": 4', '"step": -4'), "manifest.json has step=-4"),
    "manifest: step true": (_in_manifest('"step": 4', '"step": true'), "manifest.json has step=True"),
    "manifest: cursor of 10^18": (
        _in_manifest('"samples_in_epoch": 8', f'"samples_in_epoch": {10**18}'), "samples_in_epoch=1000000000000000000"
    ),
    "manifest: nested lists": (_in_manifest('"epochs": 3', f'"epochs": {DEEP}'), "more than 100 deep"),
    "manifest: nested objects": (
        _in_manifest('"epochs": 3', '"epochs": ' + '{"a":' * 600 + "1" + "}" * 600), "more than 100 deep"
    ),
    "manifest: two million lists": (_in_manifest('"epochs": 3', f'"epochs": {GROUPS}'), "lists and objects, 300000 are allowed"),
    "manifest: a name with an escape": (
        _in_manifest('"model/model.safetensors"', '"model/\\u001b[2J"'), "which has control characters"
    ),
    "manifest: versions of lists": (_in_manifest('"python": "3"', '"python": []'), "manifest.json has versions="),
    "manifest: files as a list": (_in_manifest('"files": {', '"files": [], "more": {'), "manifest.json has files=[]"),
    "manifest: no epoch": (_in_manifest('"epoch": 1', '"other": 1'), "manifest.json lacks epoch"),
    "manifest: 400000 parts": (
        _in_manifest('"bytes": 136', f'"parts": {{"bytes": [{MANY_BYTES}], "xxh3_128": [{MANY_DIGESTS}]}}, "bytes": 136'),
        "has 400000 parts, 50000 are allowed",
    ),
    "directories in each other": (_deep_directories, "more than 100 directories deep"),
    "state: 1e999": (_in_state('"step": 4', '"step": 1e999'), "state.json has the number 1e999"),
    "state: 400 digits": (_in_state('"train_time_s": 1.5', '"train_time_s": ' + "1" * 400), "state.json has a number of 400 digits"),
    "state: a start without a step": (
        _in_state('"fit_starts": [[0, 0]]', '"fit_starts": [[]]'),
        "fit_starts=[[]], which is not a list of a list of two",
    ),
    "state: a sum without its count": (
        _in_state('"epoch_sums": {"loss": [1.0, 8.0]}', '"epoch_sums": {"loss": [1.0]}'),
        "epoch_sums={'loss': [1.0]}, which is not an object of a list of two",
    ),
    "state: no position": (_in_state('"samples_in_epoch": 8, ', ""), "state.json is not a training state (has no samples_in_epoch)"),
    "state: nested lists": (_in_state('"best": 0.5', f'"best": {DEEP}'), "more than 100 deep"),
    "state: two million lists": (_in_state('"best": 0.5', f'"best": {GROUPS}'), "lists and objects, 300000 are allowed"),
    "state: two million numbers": (_in_state('"best": 0.5', f'"best": {NUMBERS}'), "values and names, 1350000 are allowed"),
    "state: negative step": (_in_state('"step": 4', '"step": -4'), "has step=-4"),
    "state: cursor of 10^18": (_in_state('"samples_in_epoch": 8', f'"samples_in_epoch": {10**18}'), f"samples_in_epoch={10**18}"),
    "state: cursor beyond all samples": (
        _in_state('"samples_in_epoch": 8', '"samples_in_epoch": 41'), "samples_in_epoch=41, more than samples_seen=40"
    ),
    "state: negative seconds": (_in_state('"train_time_s": 1.5', '"train_time_s": -1.5'), "train_time_s=-1.5"),
    "state: metrics of texts": (_in_state('"loss": 0.5', '"loss": "low"'), "has metrics="),
    "state: a row without a step": (_in_state('"rows": [', '"rows": [{"loss": 1.0},'), "row without its step and epoch"),
    "state: callbacks as a list": (_in_state('"callbacks": {', '"callbacks": [1], "more": {'), "has callbacks=[1]"),
    "state: an unknown array": (_in_state('"best": 0.5', '"best": {"__array__": "0"}'), "state.json is not a training state"),
    "state: no backend": (_in_state('"backend": {', '"backend": [], "more": {'), "has backend=[]"),
    "state: too large": (_written(STATE, 17 << 20, read_state), "bytes, 16777216 are allowed"),
    "header: one long text": (
        _header(b'{"__metadata__":{"a":"' + b"x" * 24_000_000 + b'"}}'), "x.safetensors"
    ),
    "header: nested lists": (_header(b"[" * 12_000_000), "x.safetensors"),
    "header: 400000 tensors": (_header(b"{" + TENSORS.encode() + b"}"), "x.safetensors"),
    "header: a million lists": (_header(b'{"a":[' + b"[]," * 4_000_000 + b"[]]}"), "x.safetensors"),
    "header: 600000 notes": (_header(b'{"__metadata__":{' + NOTES.encode() + b"}}"), "more than 1000000 names and texts"),
    "header: a shape of 10^18": (
        _header(b'{"a":{"dtype":"F32","shape":[1000000000000000000],"data_offsets":[0,4]}}'), "x.safetensors"
    ),
    "config: billion laughs": (_config(LAUGHS), "after its aliases are replaced"),
    "config: a long text many times": (_config(LONG_TEXT), "after its aliases are replaced"),
    "config: an alias of itself": (_config("a: &a [*a]\n"), "but no anchor &a ends before it"),
    "config: nested lists": (_config(f"a: {DEEP}\n"), "more than 100 deep"),
    "config: nested mappings": (_config("".join(" " * i + "a:\n" for i in range(600))), "more than 100 deep"),
    "config: a million values": (_config("a: [" + "1," * 1_000_000 + "]\n"), "has more than 262144 bytes"),
    "config: 100000 values": (_config("epochs: [" + "1," * 100_000 + "]\n"), "has more than 50000 values"),
    "config: merged mappings": (
        _config("a: &a {x: 1}\n" + "".join(
            f"{after}: &{after} {{<<: [{', '.join(f'*{before}' for _ in range(9))}]}}\n"
            for before, after in zip("abcdefgh", "bcdefghi", strict=True)
        )), "after its aliases are replaced",
    ),
    "config: 1.0e+999": (_config("epochs: 1.0e+999\n"), "has the number 1.0e+999, which is too large"),
    "config: 400 digits": (_config(f"epochs: {'9' * 400}\n"), "a number of more than 300 digits"),
    "config: 5000 digits": (_config(f"epochs: {'9' * 5000}\n"), "is not YAML"),
    "config: hexadecimal": (_config(f"epochs: 0x{'f' * 200_000}\n"), "a number of more than 300 digits"),
    "config: a date that is none": (_config("epochs: 2026-99-99\n"), "is not YAML"),
    "config: a tag that does not fit": (_config("epochs: !!int ''\n"), "is not YAML"),
    "config: code": (_config("epochs: !!python/object/apply:os.system ['true']\n"), "is not YAML"),
    "config: an unhashable name": (_config("? {a: 1}\n: 2\n"), "is not YAML"),
    "recorded: billion laughs": (_recorded(LAUGHS), "after its aliases are replaced"),
    "recorded: sources of lists": (_recorded("sources: [1]\n"), "it has sources=[1], which is not an object"),
    "recorded: a list": (_recorded("- 1\n"), "config.yaml"),
    "recorded: a name that is a number": (_recorded("1: 2\n"), "config.yaml"),
    "recorded: a pipe": (_pipe, "is not a regular file"),
    "sweep.yaml: billion laughs": (_sweep_yaml(LAUGHS), "sweep.yaml is damaged"),
    "sweep.yaml: nested lists": (_sweep_yaml(f"a: {DEEP}"), "sweep.yaml is damaged"),
    "sweep.yaml: number of samples": (_sweep_yaml("num_samples: x"), "num_samples='x'"),
    "sweep.yaml: a date": (_sweep_yaml("metric: loss\nmode: min\nother: 2026-01-01"), "other="),
    "sweep.json: 1e999": (_sweep_json(SWEEP % ("1", "1e999")), "has the number 1e999"),
    "sweep.json: 400 digits": (_sweep_json(SWEEP % ("9" * 400, "1")), "has a number of 400 digits"),
    "sweep.json: nested lists": (_sweep_json(SWEEP % (DEEP, "1")), "more than 100 deep"),
    "sweep.json: two million lists": (_sweep_json(SWEEP % (GROUPS, "1")), "lists and objects, 300000 are allowed"),
    "sweep.json: two million numbers": (_sweep_json(SWEEP % (NUMBERS, "1")), "values and names, 1350000 are allowed"),
    "sweep.json: 501 parameters": (
        _sweep_json(SWEEP.replace('"lr"', ",".join(f'"{i}":0' for i in range(500)) + ', "lr"') % (1, 1)), "501 parameters, 500 are allowed"
    ),
    "sweep.json: a parameter of a long name": (_sweep_json(SWEEP.replace("lr", "x" * 201) % (1, 1)), "has 201 letters"),
    "sweep.json: a long metric": (_sweep_json((SWEEP % (1, 1)).replace('"loss",', f'"{"x" * 5000}",')), "a text of up to 4096 letters"),
    "sweep.json: negative epochs": (_sweep_json((SWEEP % (1, 1)).replace('"id"', '"epochs": -1, "id"')), "epochs=-1"),
    "sweep.json: a trial that is a number": (_sweep_json('{"metric": "a", "mode": "min", "trials": [1]}'), "trials=[1]"),
    "sweep.json: too large": (_written("sweep.json", 17 << 20, read_sweep), "bytes, 16777216 are allowed"),
    "trials.jsonl: too large": (_written("trials.jsonl", 33 << 20, _journal), "trials.jsonl' cannot be read"),
    "trials.jsonl: many objects": (_written("trials.jsonl", '{"trial": {}}\n' * 500_000, _journal), "300000 lists and objects"),
    "events.jsonl: too large": (_written("events.jsonl", 33 << 20, _events), "events.jsonl' has 34603008 bytes"),
    "events.jsonl: many numbers": (
        _written("events.jsonl", f'{{"event": "a", "time": 1, "a": [{"1," * 300_000}1]}}\n' * 6, _events), "1500000 values and names"
    ),
    "events.jsonl: many objects": (
        _written("events.jsonl", '{"event": "a", "time": 1}\n' * 500_000, _events), "300000 lists and objects"
    ),
    "result.json: 1e999": (_result('{"steps": 1e999}'), "result.json' has the number 1e999"),
    "result.json: negative steps": (_result('{"steps": -1}'), "result.json' has steps=-1"),
    "result.json: 400 digits": (_result(f'{{"total_time": {"9" * 400}}}'), "has a number of 400 digits"),
    "result.json: a text as a metric": (_result('{"best_metrics": {"loss": "x"}}'), "has best_metrics="),
    "result.json: nested lists": (_result(f'{{"a": {DEEP}}}'), "more than 100 deep"),
    "result.json: too large": (
        _written("result.json", 2 << 20, lambda path: read_state_of(path)), "bytes, 1048576 are allowed"
    ),
}  # fmt: skip


# ------------------------------------------------------------------ files just within the limits


def _count(text: str) -> int:
    return sum(map(text.count, ",:[{"))


def _items(item: str, num_bytes: int, num_values: int) -> str:
    """Return a list that repeats `item`, with `num_bytes` bytes or `num_values` values, or as many lists as a file may have."""
    groups = item.count("[") + item.count("{")
    most = (
        num_bytes // (len(item) + 1),
        num_values // (_count(item) + 1),
        MAX_CONTAINERS // groups if groups else num_values,
    )
    return "[" + ",".join([item] * (min(most) - 100)) + "]"


def _names(num_bytes: int, num_values: int) -> str:
    return "{" + ",".join(f'"{number:x}":300' for number in range(min(num_bytes // 12, num_values // 2 - 100))) + "}"


def _letters(num_bytes: int, num_values: int) -> str:
    return (
        '"' + "x" * (num_bytes - 100) + '\\ud83d\\ude00"'
    )  # one letter that needs four bytes, so that each of them takes four


SHAPES: dict[str, Callable[[int, int], str]] = {
    "numbers": functools.partial(_items, "300"),
    "texts": functools.partial(_items, '"\\u0101x"'),
    "lists": functools.partial(_items, "[]"),
    "objects": functools.partial(_items, '{"a":1}'),
    "names": _names,
    "repeated names": lambda num_bytes, num_values: _names(num_bytes, 98_000),
    # Their strings make the reader look at each number, and those of the second shape have one that no float holds.
    "floats": lambda num_bytes, num_values: _items("1.5", num_bytes - 20, num_values)[:-1] + ',"1e999"]',
    "large floats": lambda num_bytes, num_values: _items("1.5", num_bytes - 20, num_values)[:-1] + ",1e999]",
    # Long numbers in a text, one after the other and as if they were values, among which the reader looks for the one that it names
    "digits": lambda num_bytes, num_values: '["' + ("9" * 300 + "x") * (num_bytes // 301 - 20) + f'",{"9" * 4301}]',
    "long numbers": lambda num_bytes, num_values: '["' + ("," + "9" * 300) * (num_bytes // 301 - 20) + '",1e999]',
    "letters": _letters,
    "wide letters": lambda num_bytes, num_values: f'"{"x" * (min(num_bytes, MAX_WIDE_BYTES) - 4000)}\U0001f600"',
}


def _in_a_process(act: Callable[[], object]) -> None:
    """Call `act` in a process of its own, so that what it leaves in memory does not count here."""
    if (pid := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        act()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def _command(*arguments: str | Path) -> None:
    """Run a command. Raise ConfigError with its message if it fails."""
    errors = io.StringIO()
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(errors),
    ):
        try:
            command(list(map(str, arguments)))
        except SystemExit as end:
            if end.code:
                raise ConfigError(errors.getvalue().strip()) from None


def _full_state(shape: str, path: Path) -> None:
    def edit(text: str) -> str:
        return text.replace('"best": 0.5', f'"best": {SHAPES[shape](MAX_JSON_BYTES - 2000, MAX_VALUES)}', 1)

    _in_a_process(lambda: write_checkpoint(path / "step-00000004", state=edit))
    read_state(path / "step-00000004")


def _full_sweep(shape: str, path: Path) -> None:
    def write() -> None:
        content = SHAPES[shape](MAX_JSON_BYTES - 200, MAX_VALUES)
        trial = TRIAL.replace('{"lr": %s}', content if shape == "names" else f'{{"lr": {content}}}') % 1
        (path / "sweep.json").write_text(f'{{"metric": "loss", "mode": "min", "trials": [{trial}, {TRIAL % (1, 1)}]}}')

    _in_a_process(write)
    _command("report", path)


def _full_result(shape: str, path: Path) -> None:
    name = "best_metrics" if shape == "names" else "error"
    text = f'{{"status": "failed", "{name}": {SHAPES[shape](MAX_RECORD_BYTES - 200, 2 * MAX_METRICS)}}}'
    for each in ("a", "b"):
        write_run(path / each, steps=100)
        (path / each / "result.json").write_text(text)
    _command("status", "--once", path / "a")
    _command("compare", path / "a", path / "b")


def _write_lines(file: Path, begin: str, shape: str, end: str, num_bytes: int, num_values: int) -> None:
    line = begin + SHAPES[shape](MAX_LINE_BYTES - 200, MAX_VALUES) + end
    with file.open("w") as opened:
        for _ in range(min(num_bytes // len(line), num_values // _count(line))):
            opened.write(line)


def _full_events(shape: str, path: Path) -> None:
    run, begin = write_run(path / "run", steps=100), '{"event": "started", "time": 1, "a": '
    _in_a_process(lambda: _write_lines(run / "events.jsonl", begin, shape, "}\n", JOURNAL[0], JOURNAL[2]))
    _command("why", run)


def _failed_saves(path: Path) -> None:
    run, cause = write_run(path / "run", steps=100), f"{'x' * 3500}\\ud83d\\ude00"
    line = f'{{"event": "save_failed", "time": 1, "checkpoint": "a", "cause": "{cause}"}}\n'
    (run / "events.jsonl").write_text(line * ((90 << 20) // (4 * len(cause))))
    _command("why", run)


def _full_journal(shape: str, path: Path) -> None:
    begin = '{"trial": 0, "event": "row", "time": 1, "row": {"a": '
    _in_a_process(lambda: _write_lines(path / "trials.jsonl", begin, shape, "}}\n", JOURNAL[0], JOURNAL[2]))
    _journal(path)


def _one_configuration(path: Path) -> None:
    """A sweep whose one trial has a configuration of many values and many rows, each of which refers to it."""
    config = _names(MAX_LINE_BYTES - 200, MAX_VALUES)
    started = f'{{"trial": 0, "event": "started", "time": 1, "config": {config}}}\n'
    (path / "trials.jsonl").write_text(started + '{"trial": 0, "event": "row", "time": 1, "row": {}}\n' * 1000)
    sweep = Sweep(path, "loss", "min")
    sweep.read()
    sweep.recall({})


def _metrics(name: str, begin: str, path: Path) -> None:
    run = write_run(path / "run", steps=100)
    _in_a_process(lambda: _write_lines(run / name, begin, "texts", "}\n", 40 << 20, METRICS[2]))
    _command("report", run)


def _locks(path: Path) -> None:
    run = write_run(path / "run", steps=100)
    for name in (".lock", ".part"):
        _written(name, 1 << 30, lambda path: None)(run)
    _command("status", "--once", run)


_ROW = '{"step": 1, "epoch": 1, "time": 1, "a": '
_MEDIUM = '{"path": "a", "name": "a", "kind": "text", "step": 1, "time": 1, "a": '
# Name -> function that writes and reads the file in an empty directory. It may refuse the file.
FULL: dict[str, Callable[[Path], Any]] = {
    **{f"state of {shape}": functools.partial(_full_state, shape) for shape in SHAPES if shape != "repeated names"},
    **{f"sweep of {shape}": functools.partial(_full_sweep, shape) for shape in ("texts", "names", "letters")},
    **{f"result of {shape}": functools.partial(_full_result, shape) for shape in ("names", "letters")},
    **{
        f"events of {shape}": functools.partial(_full_events, shape)
        for shape in ("texts", "names", "repeated names", "floats", "large floats", "digits", "long numbers", "letters")
    },
    **{
        f"trials of {shape}": functools.partial(_full_journal, shape)
        for shape in ("numbers", "names", "repeated names")
    },
    "events of failed saves": _failed_saves,
    "trials of one configuration": _one_configuration,
    "metrics of texts": functools.partial(_metrics, "metrics.jsonl", _ROW),
    "media of texts": functools.partial(_metrics, "media.jsonl", _MEDIUM),
    "locks": _locks,
}


def _allow(num_bytes: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, resource.RLIM_INFINITY))


def _print_line(name: str, read: Callable[[Path], Any], directory: Path) -> None:
    """Print the line of a case. If it takes too long, perhaps because other processes slow the machine down, try it twice again."""
    lines: list[dict[str, Any]] = []
    while not lines or (len(lines) < 3 and lines[-1]["cpu_s"] >= SECONDS):
        (attempt := directory / str(len(lines))).mkdir(parents=True)
        lines.append(_line_of(name, read, attempt))
    print(json.dumps(lines[-1]), flush=True)


def _line_of(name: str, read: Callable[[Path], Any], directory: Path) -> dict[str, Any]:
    _allow(MEMORY_BYTES)
    began, error = time.process_time(), None
    try:
        read(directory)
    except BaseException as raised:
        error = raised
    seconds = time.process_time() - began
    trace = "" if error is None else "".join(traceback.format_exception(error)[-3:])
    return {"name": name, "kind": type(error).__name__, "message": str(error), "cpu_s": seconds, "trace": trace[-2000:]}


def main() -> None:
    """Read each file in a directory of its own."""
    list_checkpoints(Path("nowhere"))
    with tempfile.TemporaryDirectory() as place:
        _header(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}} '
        )  # what is imported on first use does not count
        (Path(place) / "first").mkdir()
        verify(write_checkpoint(Path(place) / "first" / "step-00000004"))
        read_raw(Path(place) / "first" / "step-00000004" / "model" / "model.safetensors")
        read_state(Path(place) / "first" / "step-00000004")
        _command("report", write_sweep(Path(place) / "sweep", trials=2))
        for verb in ("why", "report"):
            _command(verb, write_run(Path(place) / verb, steps=100))
        readers = {name: read for name, (read, _) in CASES.items()} | FULL
        for number, (name, read) in enumerate(readers.items()):
            _in_a_process(functools.partial(_print_line, name, read, Path(place) / str(number)))


if __name__ == "__main__":
    sys.exit(main())
