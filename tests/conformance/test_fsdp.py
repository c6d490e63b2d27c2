"""A model sharded over two processes trains as a whole one does, every option has its effect, and checkpoints open elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file

from distributed.backends.fsdp import FSDPBackend
from distributed.errors import ConfigError
from tests.conformance.runs import FULL, arguments, assert_same, events

JOB = Path(__file__).parent / "jobs" / "sharded.py"
EXACT = ["layers", "hidden", "object", "whole", "classes", "size", "kept", "offload", "recompute"]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, run_cli_once):
    """Return backend -> (what every case wrote on each rank, the directory of the weights)."""
    found = {}
    for backend in ("pytorch-ddp", "fsdp"):
        out = tmp_path_factory.mktemp(backend)
        command = ["train", "--script", str(JOB), "--nproc-per-node", "2", "--run-dir", str(out / "run")]
        done = run_cli_once([*command, "--", str(out), backend], timeout=150)
        assert done.returncode == 0, done.output[-3000:]
        if backend == "fsdp":
            assert done.stdout.count("fsdp.cpu_offload frees no memory here") == 1
        found[backend] = ([json.loads((out / f"{rank}.json").read_text()) for rank in range(2)], out)
    return found


@pytest.fixture
def sharded(worlds):
    """Return case -> what rank 0 saw."""
    return worlds["fsdp"][0][0]


def moved(worlds, case, other=None):
    """Return the largest difference of the final weights of `case` from those of whole replicas."""
    here = load_file(worlds["fsdp"][1] / f"{case}.safetensors")
    there = load_file(worlds["pytorch-ddp"][1] / f"{other or case}.safetensors")
    assert set(here) == set(there)
    return max(numpy.abs(here[name] - there[name]).max() for name in there)


@pytest.mark.parametrize("case", EXACT)
def test_a_sharded_model_trains_as_a_whole_one(worlds, case):
    assert moved(worlds, case) < 1e-9
    one, other = worlds["fsdp"][0][0][case], worlds["pytorch-ddp"][0][0][case]
    for name in ("before", "loss", "val_loss", "predicted"):
        assert numpy.allclose(one[name], other[name], rtol=0, atol=1e-9), name
    assert one["on"] == other["on"]  # compares a buffer that no checkpoint holds


def test_each_rank_holds_its_part_alone(worlds):
    parts = [seen["layers"]["held"] for seen in worlds["fsdp"][0]]
    whole = worlds["pytorch-ddp"][0][0]["layers"]["held"]
    assert sum(parts) == whole
    assert max(parts) < 0.6 * whole


def test_what_a_factory_makes_has_memory_on_the_main_process_alone(worlds):
    assert [seen["layers"]["made_on"] for seen in worlds["fsdp"][0]] == ["cpu", "meta"]
    # On the meta device nothing would fill this tensor.
    assert [seen["hidden"]["made_on"] for seen in worlds["fsdp"][0]] == ["cpu", "cpu"]


def test_offloaded_parameters_train_as_others_and_on_cpus_it_is_said_that_nothing_is_freed(worlds):
    assert moved(worlds, "offload", "layers") < 1e-9  # the test that starts the workers looks for the line


def test_the_options_choose_what_is_cut_on_its_own(sharded):
    inner = ["layers.0", "layers.1"]
    assert sharded["layers"]["sharded"] == ["", *inner]
    assert sharded["whole"]["sharded"] == [""]
    parts = [f"{layer}.{part}" for layer in inner for part in ("norm", "up", "down")]
    assert sharded["classes"]["sharded"] == ["", *parts]  # not the head, which shares its weight with the embedding
    assert sharded["size"]["sharded"] == ["", *(part for part in parts if "norm" not in part)]
    assert "has no module of class 'Layers' (did you mean 'Layer'?)" in sharded["no-class"]["error"]


def test_gathered_parameters_are_freed_after_the_forward_unless_told_otherwise(sharded):
    assert not sharded["layers"]["gathered"]
    assert sharded["kept"]["gathered"]


def test_mixed_precision_moves_weights_by_its_rounding_alone(worlds):
    for case in ("bf16", "bf16-normed", "bf16-sums", "fp16"):
        assert 0 < moved(worlds, case) < 0.05, case
    assert worlds["fsdp"][0][0]["fp16"]["skipped"] == []
    assert moved(worlds, "bf16-sums", "bf16") != moved(worlds, "bf16")


def test_a_batch_norm_keeps_fp32_weights_beside_its_statistics(sharded, worlds):
    assert sharded["bf16-normed"]["sharded"] == ["", "layers.0", "layers.1", "norm"]
    here, there = (load_file(worlds[name][1] / "bf16-normed.safetensors") for name in ("fsdp", "pytorch-ddp"))
    for name in ("norm.running_mean", "norm.running_var"):
        assert numpy.allclose(here[name], there[name], rtol=0.02, atol=0.005), name


def test_all_ranks_leave_out_the_same_updates(worlds):
    for case in ("overflow", "nan"):
        one, other = (seen[case]["skipped"] for seen in worlds["fsdp"][0])
        assert one == other == worlds["pytorch-ddp"][0][0][case]["skipped"] != []


def test_an_optimizer_with_state_of_whole_parameters_is_refused(worlds):
    assert "has state of whole parameters" in worlds["fsdp"][0][0]["used-optimizer"]["error"]


def test_options_that_contradict_are_refused():
    with pytest.raises(ConfigError, match="drop one of them"):
        make({"wrap_classes": "Layer", "min_num_params": 5})
    with pytest.raises(ConfigError, match="reduce_dtype='bfloat16' has no effect without mixed_precision"):
        make({"reduce_dtype": "bfloat16"})


def make(options):
    from distributed.config.merging import Overrides, merge
    from distributed.config.plan import ProcessPlan

    merged = merge(Overrides(), {"backend": "fsdp", "fsdp": options})
    return FSDPBackend(merged, merged.config.options("fsdp"), ProcessPlan(1, 2, "cpu", "fsdp"))


FAULTS = [["step", 5, 1], ["save", 3, 0], ["save", 5, 1], ["step", 9, 0], ["validation", 3, 1], ["step", 16, 1]]


@pytest.mark.parametrize("faults", [FAULTS[2:4], pytest.param(FAULTS, marks=FULL)], ids=len)
def test_killed_at_any_moment_a_sharded_run_ends_in_the_same_bits(run_cli_once, tmp_path, faults):
    for name, struck in (("clean", []), ("hurt", faults)):
        (tmp_path / name).mkdir()
        done = run_cli_once(arguments(tmp_path / name, struck, "--backend", "fsdp"), timeout=100)
        assert done.returncode == 0, done.output

    assert events(tmp_path / "hurt" / "run").count("restarted") == len(faults)
    assert_same(tmp_path / "hurt", tmp_path / "clean")


@FULL  # test_every_backend.py loads checkpoints of single and pytorch-ddp here, and in `make test-full` those of all backends
def test_a_checkpoint_goes_on_under_any_backend_and_number_of_processes(run_cli_once, tmp_path):
    flags = ["--global-batch-size", "16", "--dtype", "float64"]
    kinds = {"single": ("single", 1), "ddp": ("pytorch-ddp", 2), "fsdp-2": ("fsdp", 2), "fsdp-3": ("fsdp", 3)}

    def train(out, kind, *more):
        backend, world = kinds[kind]
        done = run_cli_once(
            [*arguments(out, [], "--backend", backend, *flags, *more, world=world), "--float64"], timeout=180
        )
        assert done.returncode == 0, done.output
        exported = out / f"{len(list(out.iterdir()))}.safetensors"
        assert run_cli_once(["checkpoint", "export", str(out / "run"), str(exported)]).returncode == 0
        return done, load_file(exported)

    (tmp_path / "whole").mkdir()
    _, reference = train(tmp_path / "whole", "single")
    for first in ("single", "fsdp-2"):
        (tmp_path / first).mkdir()
        train(tmp_path / first, first, "--max-steps", "10")
    ways = (("single", "fsdp-3"), ("fsdp-2", "ddp"), ("fsdp-2", "single"))  # test_every_backend.py has all other pairs
    for first, then in ways:
        out = tmp_path / f"{first}-{then}"
        shutil.copytree(tmp_path / first, out)
        done, weights = train(out, then, "--resume")
        assert "resumed from step-00000010" in done.stdout
        assert max(numpy.abs(weights[name] - reference[name]).max() for name in reference) < 1e-9, (first, then)


def test_a_callback_that_evaluates_and_saves_changes_nothing_and_no_pickle_is_sent(run_cli, tmp_path):
    job = Path(__file__).parent / "jobs" / "looking.py"
    losses = []
    for words in ([], ["look"]):
        out = tmp_path / f"out-{len(words)}"
        out.mkdir()
        command = ["train", "--script", str(job), "--backend", "fsdp", "--nproc-per-node", "2", "--device", "cpu"]
        done = run_cli([*command, "--run-dir", str(out / "run"), "--", str(out), *words])
        assert done.returncode == 0, done.output
        losses.append(json.loads((out / "losses.json").read_text()))
    assert losses[0] == losses[1] and losses[0][0][0] > losses[0][-1][0]
    assert len(list((tmp_path / "out-1").glob("epoch-*.safetensors"))) == 3
