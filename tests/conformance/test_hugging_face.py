"""Tokenizer, collate function, data sets and generate() of Hugging Face, with the same result on every torch backend."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from distributed.testing import Adapter
from tests.conformance.runs import FULL, events
from tests.conftest import needs_backend

JOB = Path(__file__).parent / "jobs" / "texts.py"
STREAM = JOB.with_name("dataset_stream.py")
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
pytestmark = pytest.mark.timeout(240)


def trained(run_cli, out, backend, *flags):
    pytest.importorskip("datasets")
    pytest.importorskip("transformers")
    needs_backend(backend)
    out.mkdir()
    command = ["train", "--script", str(JOB), "--nproc-per-node", "1" if backend == "single" else "2", *flags]
    done = run_cli([*command, "--run-dir", str(out / "run"), "--", str(out), backend], timeout=200, env=OFFLINE)
    assert done.returncode == 0, done.output[-3000:]
    return json.loads((out / "seen.json").read_text())


@pytest.fixture(scope="module")
def alone(run_cli_once, tmp_path_factory):
    return trained(run_cli_once, tmp_path_factory.mktemp("texts") / "single", "single")


@pytest.mark.parametrize(
    ("backend", "flags"),
    [
        ("pytorch-ddp", ()),
        pytest.param("fsdp", (), marks=FULL),
        pytest.param("ray", (), marks=FULL),
        pytest.param("horovod", (), marks=FULL),
        pytest.param("deepspeed", ("--set", "deepspeed.zero_stage=1"), marks=FULL),
        pytest.param("deepspeed", ("--set", "deepspeed.zero_stage=3"), marks=FULL),
    ],
)
def test_metrics_get_each_generated_text_once_as_in_one_process(backend, flags, alone, run_cli, tmp_path):
    found = trained(run_cli, tmp_path / "out", backend, *flags)
    assert len(alone["seen"]) == 3 and [len(each["ids"]) for each in alone["seen"]] == [11] * 3
    assert {len(row) for each in alone["seen"] for row in (*each["ids"], *each["labels"])} == {8}
    lengths = {sum(word > 0 for word in row) for row in alone["seen"][-1]["ids"]}
    assert len(lengths) > 1  # texts end at different lengths, so that ranks have different work
    assert found["seen"] == alone["seen"]
    assert [*alone["told"]] == ["2", "4", "6"]
    assert all(len(text) > len("a b c\nd\n") for text in alone["told"].values())
    assert found["told"] == alone["told"]
    assert found["row"] == pytest.approx(alone["row"], rel=1e-4)
    assert found["evaluated"]["exact"] == alone["evaluated"]["exact"] == found["row"]["val_exact"]

    import transformers

    saved = tmp_path / "out" / "saved"
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    model = transformers.T5ForConditionalGeneration.from_pretrained(saved).eval()
    inputs = tokenizer(["a"], return_tensors="pt")
    ids = model.generate(inputs["input_ids"], max_new_tokens=7, eos_token_id=[1, *range(3, 16, 2)])[0].tolist()
    assert ids == alone["seen"][-1]["ids"][0][: len(ids)]


@pytest.fixture(scope="module")
def streamed(tmp_path_factory, run_cli_once):
    """Return a function that trains on a stream of rows and returns its directory. Each training is made once, at its first use."""
    pytest.importorskip("datasets")

    @functools.cache
    def run(row, kind, *more):
        adapter = Adapter.parse(row)
        needs_backend(adapter.backend)
        out = tmp_path_factory.mktemp(f"{kind}-{adapter.backend}")
        command = ["train", "--script", STREAM, *adapter.flags(*adapter.world_sizes)]
        done = run_cli_once([*command, "--run-dir", out / "run", "--", out, kind, *more], timeout=200, env=OFFLINE)
        assert done.returncode == 0, done.output[-3000:]
        return out

    return run


def state_of_stream(run_dir, step):
    return (run_dir / "checkpoints" / f"step-{step:08d}" / "state.json").read_text()


# Row -> the kinds of streams and the element type.
STREAMS = {
    "pytorch-ddp:2": (("table", "mapped", "shuffled"), "float64"), "fsdp:2": (("table", "mapped", "shuffled"), "float64"),
    "horovod:2": (("table", "mapped"), "float64"), "ray[cpus_per_worker=0.5]:2": (("table",), "float64"),
    "deepspeed[zero_stage=3]:2": (("table", "mapped"), "float32"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("row", "kind"),
    [
        # Each of the trainings under Ray starts a cluster.
        pytest.param(row, kind, marks=[pytest.mark.timeout(600)] * row.startswith("ray"))
        for row, (kinds, _) in STREAMS.items()
        for kind in kinds
    ],
)
def test_a_stream_of_rows_goes_on_inside_an_epoch_after_a_kill_with_the_same_bits(streamed, row, kind):
    asked = kind, "--dtype", STREAMS[row][1]
    whole, killed = streamed(row, *asked), streamed(row, *asked, "--kill", "13")
    assert (killed / "killed").exists() and "restarted" in events(killed / "run")
    # The library's own state, from which the stream goes on. It lacks the content of a buffer, so such a stream is read again.
    assert ("examples_iterable" in state_of_stream(killed / "run", 12)) is (kind != "shuffled")
    one, other = (load_file(out / "weights.safetensors") for out in (whole, killed))
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)
    alone = load_file(streamed("single:1", *asked) / "weights.safetensors")
    assert max(float((one[name] - alone[name]).abs().max()) for name in one) < (1e-9 if "float64" in asked else 1e-5)
