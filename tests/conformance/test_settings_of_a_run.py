"""Settings contradict an earlier run, or ask for another world than the running one."""

from __future__ import annotations

import json

import pytest
import yaml

SCRIPT = """
import sys, torch
from torch.utils.data import TensorDataset
from distributed import PyTorchDDPTrainer, Trainer

generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(64, 4, generator=generator), torch.randint(0, 3, (64,), generator=generator))
model = lambda: torch.nn.Linear(4, 3)
trainer = {trainer}
trainer.fit(data, data)
"""


@pytest.fixture
def script(tmp_path):
    def write(trainer):
        path = tmp_path / "train.py"
        path.write_text(SCRIPT.format(trainer=trainer))
        return str(path)

    return write


def test_a_checkpoint_directory_of_an_earlier_run_is_not_taken_over_unasked(script, run_python, tmp_path):
    first = run_python([script("Trainer(model, checkpoint_dir='kept')")], cwd=tmp_path)
    assert first.returncode == 0, first.output
    before = sorted(path.name for path in (tmp_path / "kept").iterdir())
    second = run_python([script("Trainer(model, checkpoint_dir='kept', epochs=2)")], cwd=tmp_path)
    assert second.returncode != 0 and "resume_from_checkpoint=true" in second.stderr
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == before
    again = run_python(
        [script("Trainer(model, checkpoint_dir='kept', epochs=2, resume_from_checkpoint=True)")], cwd=tmp_path
    )
    assert again.returncode == 0 and "resumed from step-00000002" in again.stdout, again.output


def test_a_rate_set_at_resume_holds_for_the_rest(script, run_cli, tmp_path):
    command = ["train", "--script", script("Trainer(model)"), "--run-dir", str(tmp_path / "run")]
    assert run_cli([*command, "--epochs", "1"]).returncode == 0
    done = run_cli([*command, "--epochs", "2", "--resume", "--learning-rate", "0.5"])
    assert done.returncode == 0 and "learning_rate=0.5 replaces the checkpoint's 0.001" in done.stdout, done.output
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["learning_rate"] for row in rows if row["split"] == "train"] == [0.001, 0.5]


def test_a_pinned_ddp_trainer_runs_alone_in_a_plain_script(script, run_python, tmp_path):
    done = run_python([script("PyTorchDDPTrainer(model)")], cwd=tmp_path)
    assert done.returncode == 0 and "backend pytorch-ddp, 1 process" in done.stdout, done.output


def test_gpus_asked_for_in_the_script_are_not_ignored_in_its_workers(script, run_cli, tmp_path):
    done = run_cli(
        ["train", "--script", script("Trainer(model, num_gpus=2)"), "--nproc-per-node", "2", "--device", "cpu"],
        cwd=tmp_path,
    )
    assert done.returncode in (2, 3) and "GPU" in done.stderr, done.output


def test_a_run_of_a_plain_script_starts_again_from_its_config_and_names_the_file_of_each_value(
    script, run_python, run_cli, tmp_path
):
    script("Trainer(model, 'settings.yaml', epochs=2, ddp={'static_graph': True})")
    (tmp_path / "settings.yaml").write_text("epochs: 5\nnproc_per_node: 2\nddp: {bucket_cap_mb: 3}\nsave_interval: 1\n")
    done = run_python(["train.py", "--deep", "3"], cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("save_interval is read as") == 1, done.output
    (run_dir,) = (tmp_path / "runs").iterdir()
    config = run_dir.relative_to(tmp_path) / "config.yaml"
    text = (tmp_path / config).read_text()
    assert "script: train.py\nscript_args:\n- --deep\n- '3'\n" in text
    for line in ("epochs: 2  # code", "nproc_per_node: 2  # file", "checkpoint_every_n_steps: 1  # file"):
        assert f"\n{line}\n" in text
    assert "\n  ddp.bucket_cap_mb: file\n" in text and "\n  ddp.static_graph: code\n" in text

    again = run_cli(["train", "--config", config, "--run-dir", "again"], cwd=tmp_path)
    assert again.returncode == 0 and f"script train.py, from {config}\n" in again.stdout, again.output
    assert yaml.safe_load((tmp_path / "again" / "config.yaml").read_text()) == yaml.safe_load(text)
    weights = [next(run.glob("checkpoints/step-*02/model/*.safetensors")) for run in (run_dir, tmp_path / "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
