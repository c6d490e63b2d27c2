"""DeepSpeed's tools open the files that `native_checkpoint` writes, and DeepSpeed's scripts run under our launcher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed.checkpoints.manifest import list_checkpoints
from distributed.checkpoints.shards import read_tensors
from distributed.checkpoints.tensor_file import RawTensor, write_tensors
from distributed.checkpoints.verifying import verify
from tests.conftest import needs_backend

JOBS = Path(__file__).parent / "jobs"
pytestmark = pytest.mark.timeout(400)

# Runs in a process that cannot import our package, because DeepSpeed's files must not need it.
OPEN = """
import json, sys
sys.modules["distributed"] = None
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file

for name, directory in json.loads(sys.argv[1]).items():
    theirs = get_fp32_state_dict_from_zero_checkpoint(directory + "/deepspeed")
    ours = load_file(directory + ".safetensors")
    assert set(theirs) == set(ours), (name, set(theirs) ^ set(ours))
    for key, value in ours.items():
        assert torch.equal(theirs[key], value) if value.is_floating_point() else theirs[key] == value, (name, key)
print("opened", len(json.loads(sys.argv[1])))
"""


@pytest.fixture(scope="module", autouse=True)
def _is_installed():
    needs_backend("deepspeed")


@pytest.fixture(scope="module")
def done(tmp_path_factory, run_cli_once):
    """Return (what rank 0 saw, the directory of the checkpoints)."""
    out = tmp_path_factory.mktemp("native")
    command = ["train", "--script", str(JOBS / "zero_native.py"), "--backend", "deepspeed", "--nproc-per-node", "2"]
    finished = run_cli_once([*command, "--run-dir", str(out / "run"), "--", str(out)], timeout=150)
    assert finished.returncode == 0, finished.output
    return json.loads((out / "0.json").read_text()), out


def checkpoints(out):
    """Return stage and precision -> the remaining checkpoints, oldest first."""
    return {
        f"{stage}-{kind}": [info.path for info in list_checkpoints(next(out.glob(f"{stage}-{kind}/**/step-*")).parent)]
        for stage in (1, 2, 3)
        for kind in ("no", "bf16")
    }


def test_deepspeeds_tools_find_our_weights_without_our_package(done, run_python):
    newest = {name: str(found[-1]) for name, found in checkpoints(done[1]).items()}
    for path in map(Path, newest.values()):
        stored, _ = read_tensors(path / "model")
        weights = [RawTensor(name, tensor.dtype, tensor.shape, tensor.read) for name, tensor in stored.items()]
        write_tensors(path.with_suffix(".safetensors"), weights, {})
    opened = run_python(["-c", OPEN, json.dumps(newest)], timeout=180)
    assert opened.stdout.endswith("opened 6\n"), opened.output


def test_they_are_part_of_the_checkpoint_sealed_counted_and_pruned_with_it(done):
    for name, found in checkpoints(done[1]).items():
        assert [path.name for path in found] == ["step-00000006", "step-00000009"]  # the newest two of steps 3, 6 and 9
        for path in found:
            manifest = verify(path)
            theirs = {file for file in manifest.files if file.startswith("deepspeed/")}
            parts = {file for file in theirs if file.endswith("optim_states.pt")}
            assert len(parts) == 2 and all("zero_pp_rank_" in part for part in parts), name  # one file per rank
            assert {"deepspeed/latest", "deepspeed/zero_to_fp32.py"} < theirs
            files = [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"]
            assert manifest.total_bytes == sum(file.stat().st_size for file in files)


def test_a_disk_that_fails_is_a_failed_save_on_that_rank(tmp_path):
    from distributed.backends._deepspeed.own_files import _Collector

    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "below", tmp_path):  # a path below a file, and a path that is a directory
        collector = _Collector()
        collector.save({}, str(path))
        with pytest.raises(OSError, match=tmp_path.name):
            collector.write()


def test_a_layer_without_a_gradient_is_refused_where_weight_decay_would_move_it(done):
    for stage in range(4):
        assert "nobody.weight and 1 more got no gradient in the first update" in done[0][f"unused-{stage}-0.1"]
        assert done[0][f"unused-{stage}-0.0"] == 9.0  # the initial value


def test_what_deepspeed_waits_for_has_our_time_limit(done):
    assert done[0]["waits"] == 77.0


def test_the_config_of_a_document_trains(done):
    seen = done[0]["document"]
    assert seen["steps"] == 60  # 30 epochs of 128 samples in batches of 64
    assert seen["loss"][-1] < seen["loss"][0] - 0.02


def test_a_script_of_deepspeeds_own_runs_and_nothing_is_compiled(run_cli, tmp_path):
    command = ["train", "--script", str(JOBS / "plain" / "zero.py"), "--backend", "deepspeed", "--nproc-per-node", "2"]
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    finished = run_cli([*command, "--run-dir", str(tmp_path / "run"), "--", "go"], env=environment, timeout=180)
    assert finished.returncode == 0, finished.output
    seen = json.loads(finished.stdout.splitlines()[-1])
    assert (seen["ranks"], seen["argv"], seen["device"], seen["restarts"]) == (3.0, ["go"], "cpu", "0")
    assert seen["last"] < 0.5 * seen["first"]
    assert not list(tmp_path.glob("extensions/*/*.o"))
