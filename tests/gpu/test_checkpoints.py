"""Checkpoints between devices, in the background, and in memory."""

from __future__ import annotations

from pathlib import Path

import torch
from gpu_support import (
    DEVICE,
    REHEARSAL,
    Net,
    checkpoint,
    data,
    distance,
    loader,
    resumed,
    run_job,
    saved,
    trainer,
    weights,
)

DOUBLE = {"dtype": "float64", "epochs": 9}


def test_a_run_goes_on_where_another_device_has_stopped():
    straight = Net(has_norm=True)
    trainer(straight, max_steps=20, **DOUBLE, device="cpu").fit(loader())
    for first, second in ((DEVICE, "cpu"), ("cpu", DEVICE)):
        halted = trainer(Net(has_norm=True), max_steps=11, **DOUBLE, device=first).fit(loader())
        model = Net(has_norm=True)
        again = trainer(model, max_steps=20, **DOUBLE, device=second, resume_from_checkpoint=str(checkpoint(halted)))
        assert again.fit(loader()).steps == 20
        assert distance(weights(model), weights(straight)) < 1e-9


def test_a_save_in_the_background_holds_the_weights_of_its_step(gpu):
    settings = {"checkpoint_every_n_steps": 2, "keep_latest_k": 99, "optimizer": None}
    straight, going_on, kept = resumed(lambda: Net(dropout=0.3, width=512), checkpoint_async=True, **settings)
    assert distance(straight, going_on) == 0.0
    at_once, _, other = resumed(lambda: Net(dropout=0.3, width=512), **settings)
    assert distance(straight, at_once) == 0.0
    files = {path.relative_to(kept) for path in kept.rglob("*.safetensors")}
    assert files == {path.relative_to(other) for path in other.rglob("*.safetensors")} and len(files) > 1
    for name in files:
        assert distance(saved(str(kept / name)), saved(str(other / name))) == 0.0
    gpu("pinned memory")
    from distributed.backends._torch.copying import TorchCopying

    ours = trainer(Net(), epochs=1)
    ours.fit(loader())
    assert torch.frombuffer(TorchCopying(ours.backend).allocate(64), dtype=torch.uint8).is_pinned()


def test_a_killed_process_goes_on_bit_for_bit(monkeypatch, tmp_path):
    trained = {}
    for name, flags in {
        "straight": [],
        "from a checkpoint": ["--checkpoint-every-n-steps", "5"],
        "from a snapshot": ["--set", "snapshot_every_n_steps=1"],
    }.items():
        where = tmp_path / name
        where.mkdir()
        monkeypatch.chdir(where)
        monkeypatch.setenv("KILLED", "" if name == "straight" else "killed")
        code, output = run_job("killed.py", "--backend", "pytorch-ddp", "--max-restarts", "1", *flags)
        assert code == 0, output
        assert ("was killed by signal 9 (SIGKILL): restarting" in output) is (name != "straight"), output
        trained[name] = saved("weights.safetensors")
    assert "resumed from" in output and ": step 12, epoch 1" in output  # the last run has lost one update
    for name in ("from a checkpoint", "from a snapshot"):
        assert distance(trained["straight"], trained[name]) == 0.0


def test_predictions_in_files_are_those_in_memory(tmp_path):
    import distributed

    model = Net()
    ours = trainer(model, epochs=1)
    ours.fit(loader())
    inputs = data().tensors[0]
    ours.predict(inputs, out=tmp_path / "predictions")
    assert torch.equal(torch.as_tensor(distributed.load_predictions(tmp_path / "predictions")), ours.predict(inputs))
    assert REHEARSAL or {p.device.type for p in model.parameters()} == {"cuda"}
    assert Path(tmp_path, "predictions").is_dir()
