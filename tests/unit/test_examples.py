"""The examples do what they say, through the command line, as a newcomer runs them."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import secrets
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from distributed import load_weights
from tests import ray_clusters
from tests.conftest import free_port

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY_GPT = ["--hidden-size", "32", "--attention-heads", "2", "--layers", "2", "--max-seq-length", "32"]


@pytest.mark.docs
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


def test_digits_reach_094_in_a_loop_of_the_script_on_shards(run_cli, tmp_path):
    script = str(EXAMPLES / "own_loop.py")
    done = run_cli(["train", "--script", script, "--backend", "fsdp", "--nproc-per-node", "2"], cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert float(re.search(r"^held-out accuracy ([\d.]+)", done.stdout, re.M).group(1)) >= 0.94


@pytest.mark.conformance
@pytest.mark.xdist_group("a cluster of Ray")
def test_the_best_checkpoint_is_served_over_http(run_cli, start, tmp_path):
    pytest.importorskip("ray.serve")
    trained = ["train", "--script", str(EXAMPLES / "train.py"), "--epochs", "2", "--run-dir", "base"]
    assert run_cli(trained, timeout=120, cwd=tmp_path).returncode == 0
    module = runpy.run_path(str(EXAMPLES / "train.py"))
    model, (_, held_out) = module["net"]().eval(), module["digits"]()
    checkpoint = load_weights(model, tmp_path / "base").source.name
    images, _ = held_out[:5]
    url = f"http://127.0.0.1:{free_port()}/"
    command = [sys.executable, str(EXAMPLES / "serve.py"), "base", "--port", url.rpartition(":")[2].strip("/")]
    environ = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    server = ray_clusters.start(lambda: start(command, cwd=tmp_path, env=environ, fresh=True), "serving base at")

    answer = posted(url, {"images": (images.squeeze(1) * 16).tolist()})
    expected = model(images).softmax(1)
    assert answer["checkpoint"] == checkpoint and answer["digits"] == expected.argmax(1).tolist()
    assert answer["probabilities"] == pytest.approx(expected.amax(1).tolist(), rel=1e-4)
    with pytest.raises(urllib.error.HTTPError, match="400"):
        posted(url, {"pictures": []})
    server.signal(signal.SIGTERM)
    server.process.wait(60)


def posted(url: str, content: object) -> dict[str, object]:
    with urllib.request.urlopen(url, json.dumps(content).encode(), timeout=30) as answer:
        return json.loads(answer.read())


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


@pytest.mark.docs
def test_keras_digits_reach_097_on_two_processes(run_cli, tmp_path):
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed here")
    command = [
        "train",
        "--script",
        str(EXAMPLES / "projects/keras/train.py"),
        "--backend",
        "pytorch-ddp",
        "--nproc-per-node",
        "2",
    ]

    done = run_cli(command, timeout=120, cwd=tmp_path)

    assert done.returncode == 0, done.output
    assert float(re.search(r"^held-out accuracy ([\d.]+)", done.stdout, re.M).group(1)) >= 0.97


@pytest.mark.docs
@pytest.mark.full
def test_a_gan_draws_digits_on_two_processes_within_a_minute(run_cli, tmp_path):
    script = str(EXAMPLES / "gan_digits.py")

    done = run_cli(
        ["train", "--script", script, "--backend", "pytorch-ddp", "--nproc-per-node", "2"], cwd=tmp_path, fresh=True
    )

    assert done.returncode == 0, done.output
    assert done.within(60)
    away = float(re.search(r"^the mean of 512 drawn digits is ([\d.]+) away", done.stdout, re.M).group(1))
    assert away < 0.25  # 0.6 before training
    assert len(Path(script).read_text().splitlines()) <= 60


def test_a_gan_has_the_same_numbers_on_one_to_three_processes(run_cli, tmp_path):
    from safetensors.numpy import load_file

    found = []
    for world in (1, 2, 3):
        flags = ["--nproc-per-node", str(world), "--dtype", "float64", "--max-steps", "40", "--run-dir", str(world)]
        done = run_cli(["train", "--script", str(EXAMPLES / "gan_digits.py"), *flags], cwd=tmp_path)
        assert done.returncode == 0, done.output
        result = json.loads((tmp_path / str(world) / "result.json").read_text())
        weights = load_file(tmp_path / str(world) / result["checkpoint"] / "model" / "model.safetensors")
        found.append(({name: result["final_metrics"][name] for name in ("d_loss", "g_loss")}, weights))
    (losses, weights), *others = found
    for other_losses, other_weights in others:
        assert other_losses == pytest.approx(losses, abs=1e-9)
        assert max(abs(other_weights[name] - weights[name]).max() for name in weights) < 1e-9
