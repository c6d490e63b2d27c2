"""The examples do what they say, through the command line, as a newcomer runs them."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY_GPT = ["--hidden-size", "32", "--attention-heads", "2", "--layers", "2", "--max-seq-length", "32"]


def test_digits_reach_097_on_two_processes_within_a_minute(run_cli, tmp_path):
    script = str(EXAMPLES / "train.py")

    done = run_cli(
        ["train", "--script", script, "--backend", "pytorch-ddp", "--nproc-per-node", "2"],
        timeout=240,
        cwd=tmp_path,
        fresh=True,
    )

    assert done.returncode == 0, done.output
    assert done.within(60)
    assert float(re.search(r"^held-out accuracy ([\d.]+)", done.stdout, re.M).group(1)) >= 0.97
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"curves runs/{run_dir.name}/curves.png" in done.stdout
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["backend"], result["world_size"]) == ("pytorch-ddp", 2)


def test_digits_are_split_the_same_way_every_time():
    module = runpy.run_path(str(EXAMPLES / "train.py"))

    (train, held_out), (again, _) = module["digits"](), module["digits"]()

    assert (len(train), len(held_out)) == (1437, 360)
    assert all(map(lambda a, b: a.equal(b), train.tensors, again.tensors))
    assert set(held_out.tensors[1].tolist()) == set(range(10))


def test_the_script_to_copy_is_short():
    assert len((EXAMPLES / "train.py").read_text().splitlines()) < 60


@pytest.fixture(scope="module")
def gpt() -> dict[str, object]:
    return runpy.run_path(str(EXAMPLES / "char_gpt.py"))


def test_vocabulary_keeps_the_most_frequent_characters(gpt):
    vocabulary = gpt["Vocabulary"]("aaabbc", 3)

    assert len(vocabulary.characters) == 3
    assert vocabulary.decode(vocabulary.encode("abc")) == "ab\N{REPLACEMENT CHARACTER}"


def test_windows_cover_the_text_once_and_targets_are_one_ahead(gpt):
    import torch

    windows = gpt["Windows"](torch.arange(11), 5)

    assert [[part.tolist() for part in windows[i]] for i in range(len(windows))] == [
        [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]],
        [[5, 6, 7, 8, 9], [6, 7, 8, 9, 10]],
    ]


def test_gpt_never_sees_the_characters_it_predicts(gpt):
    import torch

    model = gpt["GPT"](vocab_size=7, width=8, heads=2, layers=2, length=6)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = tokens.clone()
    changed[0, 4] = 0

    before, after = model(tokens)[0], model(changed)[0]

    assert before[:4].equal(after[:4])
    assert not before[4:].equal(after[4:])


def test_gpt_learns_samples_and_checkpointing_changes_nothing(run_cli, tmp_path):
    train = ["train", "--script", str(EXAMPLES / "char_gpt.py"), "--nproc-per-node", "2", "--max-steps", "30"]
    losses, texts = [], []
    for more in ([], ["--use-gradient-checkpointing"]):
        done = run_cli([*train, "--", *TINY_GPT, "--sample-length", "40", *more], timeout=240, cwd=tmp_path)
        assert done.returncode == 0, done.output
        losses.append(float(re.search(r"^held-out loss ([\d.]+)", done.stdout, re.M).group(1)))
        texts.append(re.search(r"^sample +(The .*)", done.stdout, re.M | re.S).group(1))
        assert re.search(r"^text +\d+ characters, \d+ tokens, sha256 [0-9a-f]{64}$", done.stdout, re.M), done.output
    assert losses[0] < 3.5  # a uniform guess over its characters costs ln(104) = 4.64
    assert losses[0] == losses[1]
    assert texts[0] == texts[1]
    assert "activation checkpointing on 2 blocks" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["--hidden-size", "30", "--attention-heads", "4"],
            "--hidden-size 30 is not a multiple of --attention-heads 4",
        ),
        (["--vocab-size", "1"], "--vocab-size 1 leaves no character"),
    ],
)
def test_gpt_refuses_impossible_shapes(run_python, arguments, problem):
    done = run_python([str(EXAMPLES / "char_gpt.py"), *arguments])

    assert done.returncode == 2
    assert problem in done.stderr


def test_keras_digits_reach_097_on_two_processes(run_cli, tmp_path):
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed here")
    command = [
        "train",
        "--script",
        str(EXAMPLES / "train_keras.py"),
        "--backend",
        "pytorch-ddp",
        "--nproc-per-node",
        "2",
    ]

    done = run_cli(command, timeout=120, cwd=tmp_path)

    assert done.returncode == 0, done.output
    assert float(re.search(r"^held-out accuracy ([\d.]+)", done.stdout, re.M).group(1)) >= 0.97
