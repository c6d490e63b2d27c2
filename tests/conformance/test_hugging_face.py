"""Tokenizer, collate function, data set and generate() of Hugging Face, with the same result on every torch backend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.runs import FULL
from tests.conftest import needs_backend

JOB = Path(__file__).parent / "jobs" / "texts.py"
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
    assert found["row"] == pytest.approx(alone["row"], rel=1e-4)
    assert found["evaluated"]["exact"] == alone["evaluated"]["exact"] == found["row"]["val_exact"]

    import transformers

    saved = tmp_path / "out" / "saved"
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    model = transformers.T5ForConditionalGeneration.from_pretrained(saved).eval()
    inputs = tokenizer(["a"], return_tensors="pt")
    ids = model.generate(inputs["input_ids"], max_new_tokens=7, eos_token_id=[1, *range(3, 16, 2)])[0].tolist()
    assert ids == alone["seen"][-1]["ids"][0][: len(ids)]
