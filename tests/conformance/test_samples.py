"""The sample code of the documents (000 to 004) that this package was asked from, on real data and corrected where it was wrong.

Not here: pipelines, tensor parallelism and their mixtures, MLflow (test_mlflow.py has it), and jobs for SLURM and
Kubernetes, which are not in this version; Accelerate's `prepare`, a library of its own that nothing of ours touches.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests import event_files
from tests.conftest import needs_backend

HERE = Path(__file__).parent
JOBS = HERE / "jobs" / "samples"
LOOPS, TRAINERS, ZERO = (
    "conformance/test_samples.py::test_" + name for name in ("a_loop_by_hand", "a_trainer", "deepspeed")
)
COMMUNICATION, HOROVOD, RAY, TENSORFLOW, HOOKS = (
    f"conformance/test_{name}.py::test_" for name in ("communication", "horovod", "ray", "tensorflow", "comm_hooks")
)
# The sample (document: heading), what was corrected in it, and the test that runs it.
SAMPLES = (
    (
        "000: init_process_group, backends", "world_size and rank agree with the launcher, or it is an error",
        LOOPS + "_communicates",
    ),
    ("000: DistributedSampler, data loading", "", COMMUNICATION + "a_script_for_gpus_trains_on_cpus_and_from_python"),
    ("000: launcher on the command line", "", COMMUNICATION + "every_call_works_under_our_launcher"),
    (
        "000: launch_distributed_training", "the script's arguments stand before the keywords",
        COMMUNICATION + "a_script_for_gpus_trains_on_cpus_and_from_python",
    ),
    ("000: nodes with --node_rank", "", "cli/test_launch.py::test_two_nodes_run_and_restart_together"),
    ("000: training script template", "", COMMUNICATION + "a_script_for_gpus_trains_on_cpus_and_from_python"),
    ("000: communication primitives", "torch's tensors", LOOPS + "_communicates"),
    ("000: no_sync", "each micro-batch weighs its part", LOOPS + "_communicates"),
    ("000: LaunchConfig, DistributedLauncher", "", COMMUNICATION + "a_script_for_gpus_trains_on_cpus_and_from_python"),
    (
        "000: scaling guidelines", "by lr_scaling, for the batch that runs",
        TRAINERS + "_scales_the_rate_by_the_rule_that_was_asked_for",
    ),
    ("000: DistributedDataParallel(bucket_size_mb=)", "", LOOPS + "_communicates"),
    ("000: checkpoint_scope, memory_pool_scope", "the pool is refused: torch's allocator is one", LOOPS + "_communicates"),
    ("000: get_distributed_info", "", LOOPS + "_communicates"),
    (
        "000: a rank without a batch", "calls the model, else torch's DDP exchanges nothing and the others wait",
        LOOPS + "_communicates",
    ),
    ("000: %(rank)d in the log format", "a record factory", LOOPS + "_logs_with_its_rank"),
    ("001: sync_gradients", "need not be called", LOOPS + "_communicates"),
    ("001: DistributedSampler(dataset_size=)", "", LOOPS + "_communicates"),
    ("001: reduce_scatter", "any number of rows", LOOPS + "_communicates"),
    ("001: a world of one", "", COMMUNICATION + "every_call_works_in_a_single_process"),
    ("002: train --script --backend", "", "cli/test_launch.py::test_a_torchrun_script_finds_its_world"),
    ("002: horovodrun python -m distributed.cli train", "", HOROVOD + "a_sample_trains_the_same_however_it_is_started"),
    ("002: train --backend ray --address", "", RAY + "an_existing_cluster_is_joined_by_its_address"),
    ("002: PyTorchDDPTrainer", "", TRAINERS + "_trains_and_says_what_came_of_it"),
    ("002: HorovodTrainer, metric_average, Compression", "", HOROVOD + "a_sample_trains_the_same_however_it_is_started"),
    ("002: RayTrainer in tune.run", "", RAY + "a_trial_of_ray_tune_trains_in_its_own_placement_group"),
    (
        "002: DistributedTuner", "num_gpus is what is there",
        "conformance/test_tuner.py::test_asha_stops_the_bad_ones_early_and_the_best_trainer_comes_back",
    ),
    (
        "002: MirroredStrategy and model.fit", "",
        TENSORFLOW + "tensorflows_own_way_works_in_one_process_and_finds_its_cluster_in_several",
    ),
    (
        "002: TensorFlowDistributedTrainer", "",
        TENSORFLOW + "fit_in_a_plain_script_starts_the_workers_and_takes_the_weights_back",
    ),
    ("002: DistributedConfig", "", "unit/test_config.py::test_the_seed_documents_config_is_accepted_but_for_trackers"),
    ("002: mixed precision and its scaler", "", TRAINERS + "_takes_the_scalers_settings"),
    ("002: gradient accumulation", "64 x 8 x 4 is 2048, not 512", TRAINERS + "_accumulates_by_the_batch_equation"),
    ("002: DeepSpeedConfig, zero_stage", "a dict, not keywords", ZERO + "_by_config_and_by_stage_trains"),
    ("002: warm-up", "a function of the trainer's optimizer; epochs by scheduler_interval", TRAINERS + "_warms_up_by_epochs"),
    ("002: fault-tolerant checkpoints", "", TRAINERS + "_resumes_where_it_was"),
    ("002: DistributedSampler in the loader", "not needed: it gives way", TRAINERS + "_has_an_order_of_its_own"),
    ("002: TensorBoard", "", TRAINERS + "_writes_for_tensorboard_below_the_directory_it_is_given"),
    ("002: profiling", "", TRAINERS + "_can_be_profiled"),
    (
        "003: the command line of the GPT", "one command starts all processes of a node",
        "conformance/test_samples.py::test_the_older_flags_train_the_gpt",
    ),
    ("003: synchronisation points", "all_gather takes the list first", LOOPS + "_gathers_what_each_rank_lost"),
    ("003: metrics of all ranks", "gathered, not one value repeated", LOOPS + "_gathers_what_each_rank_lost"),
    ("003: a save that fails", "agreed by all before the next collective", LOOPS + "_agrees_on_a_failed_save"),
    ("003: mixed precision", "", LOOPS + "_in_mixed_precision_learns"),
    ("003, 004: profiler with a schedule", "prof.step() for each batch", LOOPS + "_is_profiled_by_its_schedule"),
    ("004: train_ddp", "no fixed port, the local rank's device, the loss of all ranks", LOOPS + "_trains_with_ddp"),
    (
        "004: gradient accumulation", "what is left over is applied; one exchange an update",
        LOOPS + "_accumulates_as_one_big_batch_does",
    ),
    ("004: DeepSpeed", "bf16 and torch's AdamW on CPUs", ZERO + "_in_a_loop_of_ones_own_learns"),
    ("004: FSDP", "FSDP2; all ranks gather the state", LOOPS + "_is_sharded_and_saved_whole"),
    ("004: Horovod", "", HOROVOD + "a_plain_horovod_script_finds_what_it_expects"),
    ("004: gradient checkpointing", "use_reentrant=False", LOOPS + "_recomputes_to_the_same_gradients"),
    (
        "004: top-k and hierarchical all-reduce", "with error feedback, as DDP comm hooks",
        HOOKS + "topk_converges_because_it_sends_later_what_it_left_out",
    ),
)  # fmt: skip


def test_each_sample_is_run_by_a_test_that_exists():
    for sample, _, test in SAMPLES:
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (HERE.parent / file).read_text(), re.M), (sample, test)


def facts(done):
    assert done.returncode == 0, done.output[-3000:]
    (found,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    return found


def run(run_cli_once, out, job, *flags):
    command = ["train", "--script", str(JOBS / job), "--nproc-per-node", "2", "--run-dir", str(out / "run"), *flags]
    return facts(run_cli_once([*command, "--", str(out)], timeout=150))


# ------------------------------------------------------------------ loops by hand


@pytest.fixture(scope="module")
def loops(run_cli_once, tmp_path_factory):
    needs_backend("pytorch-ddp")
    return run(run_cli_once, tmp_path_factory.mktemp("loops"), "loops.py", "--backend", "pytorch-ddp")


def test_a_loop_by_hand_communicates(loops):
    found = loops["communication"]
    assert found["apart"] == 0 and found["accuracy"] > 0.5
    assert found["refused"].startswith("memory_pool_scope() would do nothing")


def test_a_loop_by_hand_logs_with_its_rank(loops):
    assert loops["logs_with_the_rank"]["line"] == "[Rank 0] INFO: Training started: 2 processes\n"


def test_a_loop_by_hand_gathers_what_each_rank_lost(loops):
    assert loops["synchronisation"] == {"losses": [1.0, 2.0], "mean": 1.5}


def test_a_loop_by_hand_agrees_on_a_failed_save(loops):
    assert loops["a_save_that_fails_on_one_rank"] == {"saved": False}  # on rank 0, whose own went well


def test_a_loop_by_hand_in_mixed_precision_learns(loops):
    found = loops["mixed_precision"]
    assert found["last"] < found["first"] / 2 and found["apart"] == 0
    assert 0 < found["norm"] < 100  # of the gradients, not of the scaled ones


def test_a_loop_by_hand_is_profiled_by_its_schedule(loops):
    assert loops["profile"] == {"reductions": True}


def test_a_loop_by_hand_trains_with_ddp(loops):
    found = loops["ddp"]
    assert found["accuracy"] > 0.9 and found["loss"] < 0.4 and found["apart"] == 0 and found["epoch"] == 3


def test_a_loop_by_hand_accumulates_as_one_big_batch_does(loops):
    found = loops["accumulation"]
    assert found["updates"] == [7, 7] and found["apart"] < 1e-12  # 25 batches by fours: the last update has one


def test_a_loop_by_hand_recomputes_to_the_same_gradients(loops):
    assert loops["checkpointed"]["apart"] < 1e-12


def test_a_loop_by_hand_is_sharded_and_saved_whole(loops):
    found = loops["fsdp"]
    assert found["accuracy"] > 0.7  # of a plain model with the stored state
    assert 0.4 < found["kept"] < 0.6


# ------------------------------------------------------------------ trainers


@pytest.fixture(scope="module")
def trainers(run_cli_once, tmp_path_factory):
    needs_backend("pytorch-ddp")
    return run(run_cli_once, tmp_path_factory.mktemp("trainers"), "trainers.py", "--backend", "pytorch-ddp")


def test_a_trainer_trains_and_says_what_came_of_it(trainers):
    found = trainers["a_trainer"]
    assert found["accuracy"] > 0.85 and found["time"] > 0
    assert found["steps"] == 4 * math.ceil(1437 / 64) and f"step-{found['steps']:08d}" in found["saved"]


def test_a_trainer_takes_the_scalers_settings(trainers):
    found = trainers["fp16_and_its_scaler"]
    assert found["losses"][1] < found["losses"][0] and found["scale"] == 2**16


def test_a_trainer_accumulates_by_the_batch_equation(trainers):
    assert trainers["accumulation"]["steps"] == math.ceil(1437 / (8 * 8 * 2))


def test_a_trainer_scales_the_rate_by_the_rule_that_was_asked_for(trainers):
    found = {rule: rates[0] for rule, rates in trainers["scaled_rates"].items()}
    assert found == pytest.approx({"none": 0.01, "linear": 0.02, "sqrt": 0.01 * math.sqrt(2)})


def test_a_trainer_warms_up_by_epochs(trainers):
    rates = trainers["warm_up"]["rates"]
    cosine = [0.01 * (1 + math.cos(math.pi * epoch / 3)) / 2 for epoch in range(3)]
    assert rates == pytest.approx([0.001, 0.0055, *cosine])


def test_a_trainer_resumes_where_it_was(trainers):
    assert trainers["fault_tolerance"]["steps"] == [10, 30]


def test_a_trainer_has_an_order_of_its_own(trainers):
    found = trainers["a_sampler_in_the_loader"]
    assert found["losses"][0] == found["losses"][1] and found["steps"] == 2 * 320 / 32


def test_a_trainer_can_be_profiled(trainers):
    assert trainers["profiling"] == {"steps": 5, "has_backward": True}


def test_a_trainer_writes_for_tensorboard_below_the_directory_it_is_given(trainers):
    (directory,) = Path(trainers["tensorboard"]["directory"]).iterdir()
    board = event_files.read(directory)
    assert event_files.steps(board, "train/loss") == [10, 20]
    assert {"val/loss", "val/accuracy", "train/learning_rate", "train/grad_norm"} <= set(board.Tags()["scalars"])


# ------------------------------------------------------------------ DeepSpeed


@pytest.fixture(scope="module")
def zero(run_cli_once, tmp_path_factory):
    needs_backend("deepspeed")
    return run(run_cli_once, tmp_path_factory.mktemp("zero"), "zero.py")


@pytest.mark.parametrize("way", ["by_config", "by_stage"])
def test_deepspeed_by_config_and_by_stage_trains(zero, way):
    found = zero[way]
    assert (found["backend"], found["stage"], found["steps"]) == ("deepspeed", 3, 3 * math.ceil(1437 / 64))
    assert found["accuracy"] > 0.85


def test_deepspeed_in_a_loop_of_ones_own_learns(zero):
    found = zero["own_loop"]
    assert found["batch"] == 32 and found["last"] < found["first"] / 2


# ------------------------------------------------------------------ the command line


def test_the_older_flags_train_the_gpt(run_cli, tmp_path):
    script = HERE.parents[1] / "examples" / "char_gpt.py"
    done = run_cli(
        [
            "train", "--script", str(script), "--world-size", "2", "--batch-size", "8", "--learning-rate", "3e-3", "--no-nccl",
            "--gradient-clip-norm", "1.0", "--save-interval", "4", "--mixed-precision", "--use-gradient-checkpointing",
            "--max-steps", "8", "--run-dir", str(tmp_path / "run"),
            "--", "--hidden-size", "32", "--attention-heads", "2", "--layers", "2", "--vocab-size", "64", "--max-seq-length", "32",
            "--sample-length", "5",
        ],
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["world_size"], result["steps"]) == (2, 8)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == [
        "step-00000004",
        "step-00000008",
    ]
    assert "activation checkpointing on 2 blocks" in done.stdout and "mixed precision bf16" in done.stdout
