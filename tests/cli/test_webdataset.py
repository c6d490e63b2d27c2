"""Streams of the WebDataset library, in the three ways that docs/data.md describes and as they are by default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import webdataset

_SAMPLES, _FILES = 160, 4
SCRIPT = """
import itertools, os, sys
import torch, webdataset as wds
from distributed import Trainer

def decode(sample):
    with open(f"seen-{os.environ['RANK']}.txt", "a") as file:
        print(sample["__key__"], file=file)
    return sample["x.npy"], sample["y.cls"]

class Parts(torch.utils.data.IterableDataset):
    def __init__(self, raw, index=0, count=1):
        self.raw, self.index, self.count = raw, index, count

    def shard(self, index, count):
        return Parts(self.raw, index, count)

    def __iter__(self):
        keep = itertools.islice(self.raw, self.index, None, self.count)
        return map(decode, wds.filters.decode()(keep))

splitters = {"split": wds.split_by_node, "presharded": wds.split_by_node, "whole": None, "parts": None}
how = {"nodesplitter": splitters[sys.argv[1]]} if sys.argv[1] in splitters else {}
raw = wds.WebDataset([f"part-{i}.tar" for i in range(FILES)], shardshuffle=False, **how)
stream = Parts(raw) if sys.argv[1] == "parts" else raw.decode().map(decode)
torch.manual_seed(0)
model = torch.nn.Linear(8, 2, dtype=torch.float64)
trainer = Trainer(
    model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=torch.nn.functional.cross_entropy,
    global_batch_size=16, checkpoint_frequency=None, data={"presharded": sys.argv[1] == "presharded"},
)
trainer.fit(stream)
if trainer.is_main_process:
    print("weights", [f"{each:.12f}" for each in model.weight.flatten().tolist()])
""".replace("FILES", str(_FILES))


@pytest.fixture
def train(run_cli: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[Any, str, list[list[str]]]]:
    """Return a function that trains on the files and returns (process, line with the weights, keys that each rank has decoded)."""
    generator = numpy.random.default_rng(0)
    for number in range(_FILES):
        with webdataset.TarWriter(str(tmp_path / f"part-{number}.tar")) as sink:
            for key in range(number * _SAMPLES // _FILES, (number + 1) * _SAMPLES // _FILES):
                row = generator.normal(size=8)
                sink.write({"__key__": f"{key:04d}", "x.npy": row, "y.cls": int(row.sum() > 0)})
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(how: str, processes: int) -> tuple[Any, str, list[list[str]]]:
        for old in tmp_path.glob("seen-*.txt"):
            old.unlink()
        command = [
            "train",
            "--script",
            "train.py",
            "--nproc-per-node",
            processes,
            "--run-dir",
            f"{how}-{processes}",
            "--",
            how,
        ]
        done = run_cli([*map(str, command)], cwd=tmp_path, timeout=120)
        weights = next((line for line in done.stdout.splitlines() if "weights" in line), "")
        return done, weights, [path.read_text().split() for path in sorted(tmp_path.glob("seen-*.txt"))]

    return run


def test_a_webdataset_gives_the_weights_of_one_process_or_is_divided_by_file(
    train: Callable[..., tuple[Any, str, list[list[str]]]],
) -> None:
    keys = [f"{key:04d}" for key in range(_SAMPLES)]
    done, weights, seen = train("whole", 1)
    assert done.returncode == 0 and weights and seen == [keys], done.output

    done, same, seen = train("whole", 2)
    assert same == weights and seen == [keys, keys], done.output

    done, same, seen = train("parts", 2)
    assert same == weights, done.output
    # Each rank also decodes the first samples of the stream, with which it compares those of the parts.
    assert [set(keys[rank::2]) <= set(each) for rank, each in enumerate(seen)] == [True, True]
    assert max(map(len, seen)) <= _SAMPLES / 2 + 32

    done, other, seen = train("presharded", 2)
    assert done.returncode == 0 and other, done.output
    assert sorted(key for each in seen for key in each) == keys and len(seen[0]) == _SAMPLES / 2


def test_a_webdataset_that_divides_itself_is_refused_unless_the_run_is_told(
    train: Callable[..., tuple[Any, str, list[list[str]]]],
) -> None:
    done, _, _ = train("split", 2)
    assert done.returncode == 2, done.output
    assert "the ranks read different streams" in done.stderr and "set data.presharded=true" in done.stderr


def test_the_default_webdataset_is_refused_on_several_processes_before_it_is_read(
    train: Callable[..., tuple[Any, str, list[list[str]]]],
) -> None:
    done, weights, _ = train("default", 1)
    assert done.returncode == 0 and weights, done.output

    done, _, seen = train("default", 2)
    assert done.returncode == 2 and seen == [], done.output
    assert "nodesplitter=webdataset.split_by_node and data.presharded=true" in done.stderr, done.output
    assert "nodesplitter=None" in done.stderr and "Traceback" not in done.output, done.output
