"""Every option has the right effect: compare with plain torch, with one process and with two."""

from __future__ import annotations

import ast
import contextlib
import math
import types
from pathlib import Path

import pytest
import torch

from distributed.config.settings import GROUPS, DistributedConfig, group_options
from distributed.launching.request import LaunchRequest
from distributed.launching.verdicts import Verdict, Verdicts
from tests.conformance.jobs import options as job
from tests.conformance.jobs.recording import distance, read
from tests.conftest import free_port

HERE = Path(__file__).parent
UPDATES = 8  # number of updates in two epochs
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, run_cli_once):
    """Return world size -> (what every case wrote on each rank, the console's text). Each world is started once."""
    found = {}
    for world in (1, 2):
        out = tmp_path_factory.mktemp(f"world-{world}")
        script = str(HERE / "jobs" / "options.py")
        done = run_cli_once(
            [
                "train",
                "--script",
                script,
                "--nproc-per-node",
                str(world),
                "--run-dir",
                str(out / "run"),
                "--",
                str(out),
            ],
            timeout=240,  # on a busy machine
        )
        assert done.returncode == 0, done.output[-3000:]
        found[world] = (read(out, world), done.stdout + done.stderr)
    return found


@pytest.fixture(params=[1, 2], ids=["single", "ddp-2"])
def world(request):
    return request.param


@pytest.fixture
def seen(worlds, world):
    """Return case -> what the main process saw, after checking that all ranks have the same weights."""
    return by_case(worlds, world)


@pytest.fixture
def ddp(worlds):
    return by_case(worlds, 2)


def by_case(worlds, world):
    cases = worlds[world][0]
    for name, ranks in cases.items():
        assert all(rank.get("weights") == ranks[0].get("weights") for rank in ranks), name
        assert all(("error" in rank) == ("error" in ranks[0]) for rank in ranks), name
    return {name: ranks[0] for name, ranks in cases.items()}


def by_hand(rates, clip=None, adamw=False, model=job.net, epochs=2):
    """Return the final weights of plain torch in float64, with `rates[i]` as the learning rate of update i."""
    model = model().double()
    x, y = job.data().tensors
    optimizer = (
        torch.optim.AdamW(model.parameters()) if adamw else torch.optim.SGD(model.parameters(), lr=1, momentum=0.9)
    )
    cuts = [slice(start, start + job.GLOBAL) for start in range(0, job.SAMPLES, job.GLOBAL)] * epochs
    for rate, cut in zip(rates, cuts, strict=False):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[cut]), y[cut]).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()


def agrees(case, expected):
    return distance(case, expected) < 1e-9


# ------------------------------------------------------------------ optimizer, rate, schedule


def test_the_reference_itself(seen):
    assert agrees(seen["plain"], by_hand([0.1] * UPDATES))
    assert not agrees(seen["plain"], by_hand([0.1] * (UPDATES - 1)))


def test_clipping_is_by_the_global_norm_before_the_update(seen):
    expected = by_hand([0.1] * UPDATES, clip=0.05)
    assert agrees(seen["clipped"], expected) and not agrees(seen["plain"], expected)
    norms = [metrics["grad_norm"] for _, _, metrics in seen["clipped"]["logged"]]
    assert min(norms) > 0.05  # logged before clipping


def test_warmup_raises_the_rate_over_its_updates(seen):
    assert agrees(seen["warmed"], by_hand([0.1 / 3, 0.2 / 3, *[0.1] * 6]))


def test_a_warmup_with_a_start_rises_by_the_same_factor_each_update(seen):
    assert agrees(seen["warmed-exponentially"], by_hand([0.1 * 100 ** (i / 3 - 1) for i in range(3)] + [0.1] * 5))


def test_accumulation_changes_no_number(seen):
    assert agrees(seen["accumulated"], by_hand([0.1] * UPDATES))


def test_the_default_is_adamw_at_the_learning_rate(seen):
    assert agrees(seen["adamw"], by_hand([0.02] * UPDATES, adamw=True))


def test_a_set_rate_replaces_that_of_an_optimizer_and_its_schedule(seen, worlds, world):
    assert agrees(seen["set-rate"], by_hand([0.02 * 0.5**i for i in range(UPDATES)]))
    assert agrees(seen["set-rate-factories"], by_hand([0.03 * 0.5**i for i in range(UPDATES)]))
    assert worlds[world][1].count("learning_rate=0.02 replaces the optimizer's 0.1") == 1
    assert worlds[world][1].count("learning_rate=0.03 replaces the optimizer's 0.1") == 1


def test_a_set_rate_cannot_replace_several_different_ones(seen):
    error = seen["set-rate-groups"]["error"]
    assert error.startswith("ConfigError: learning_rate=0.02 cannot replace the different rates 0.1, 0.3")


def test_a_rate_set_at_a_resume_replaces_the_optimizers_own_and_the_schedule_goes_on(seen, worlds, world):
    assert agrees(
        seen["set-rate-resumed"], by_hand([0.1 * 0.5**i for i in range(4)] + [0.025 * 0.5**i for i in range(4, 8)])
    )
    assert agrees(seen["schedule-resumed"], by_hand([0.1 * 0.5**i for i in range(UPDATES)]))
    assert worlds[world][1].count("learning_rate=0.025 replaces the checkpoint's 0.1") == 1


def test_a_resume_with_another_schedule_is_an_error_and_without_it_is_said(seen, worlds, world):
    error = seen["schedule-of-another-class"]["error"]
    assert error.startswith("CheckpointError: the schedule is StepLR, the checkpoint holds LambdaLR: use LambdaLR or")
    assert agrees(seen["schedule-dropped"], by_hand([0.1 * 0.5 ** min(i, 4) for i in range(UPDATES)]))
    assert worlds[world][1].count("the checkpoint has the schedule LambdaLR, which this run does not have") == 1


def factor(world):
    """Return global_batch_size / batch_size with two accumulation steps."""
    return job.GLOBAL / (job.GLOBAL / 2 / world)


def test_the_rate_is_scaled_for_default_and_given_optimizers_and_their_schedules(seen, world, worlds):
    k, cut = factor(world), [0.1 * 0.1 ** (i // 3) for i in range(UPDATES)]
    assert agrees(seen["linear-default"], by_hand([0.004 * k] * UPDATES, adamw=True))
    assert agrees(seen["sqrt-factory"], by_hand([rate * math.sqrt(k) for rate in cut]))
    assert agrees(seen["linear-object"], by_hand([0.1 * k * 0.5**i for i in range(UPDATES)]))
    assert f"lr_scaling=linear: learning rate 0.004 x {k:g} = {0.004 * k:g}" in worlds[world][1]


def test_a_schedule_with_its_own_peak_is_scaled_as_a_whole(seen, world):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule, rates = job.one_cycle(optimizer), []
    for _ in range(UPDATES):
        rates.append(optimizer.param_groups[0]["lr"] * factor(world))
        optimizer.step()
        schedule.step()
    assert agrees(seen["linear-one-cycle"], by_hand(rates))


def test_a_schedule_may_count_epochs(seen):
    expected = by_hand([0.1] * 4 + [0.05] * 4)
    assert agrees(seen["per-epoch"], expected) and agrees(seen["per-epoch-object"], expected)


def test_a_plateau_watches_the_monitor_once_an_epoch(seen):
    """The validation loss grows from the first epoch on, while the training loss falls."""
    losses = [[row[name] for row in seen["plateau"]["rows"]] for name in ("loss", "val_loss")]
    assert losses[0] == sorted(losses[0], reverse=True) and losses[1] == sorted(losses[1])
    assert agrees(seen["plateau"], by_hand([0.1] * 8 + [0.01] * 4 + [0.001] * 4, epochs=4))


def test_a_plateau_without_its_metric_is_an_error(seen):
    assert "monitor='val_losss' is not reported (did you mean 'val_loss'?)" in seen["plateau-typo"]["error"]


# ------------------------------------------------------------------ precision


def test_bf16_computes_in_bfloat16_and_keeps_float32_weights(seen):
    assert seen["bf16"]["kinds"] == ["torch.bfloat16"] and seen["bf16"]["dtypes"] == ["torch.float32"]
    assert 1e-6 < distance(seen["bf16"], seen["fp32"]) < 0.05
    assert seen["fp32"]["kinds"] == ["torch.float32"]


def test_mixed_precision_true_is_bf16_on_cpus_and_said(seen, worlds, world):
    assert distance(seen["mixed-true"], seen["bf16"]) == 0
    assert "mixed precision bf16 on cpu" in worlds[world][1]


def test_fp16_starts_at_its_scale_and_doubles_it_after_so_many_updates(seen):
    scaler = seen["fp16"]["scaler"]
    assert seen["fp16"]["kinds"] == ["torch.float16"]
    assert (scaler["scale"], scaler["_growth_tracker"], scaler["growth_interval"]) == (256 * 2**2, 8 % 3, 3)
    assert 1e-7 < distance(seen["fp16"], seen["fp32"]) < 0.02


def test_an_overflow_on_one_rank_skips_the_update_and_halves_the_scale_on_all(worlds, world):
    for rank in worlds[world][0]["fp16-overflow"]:
        values, skipped = zip(*rank["each"], strict=True)
        assert list(skipped) == [False, True, *[False] * 6]
        assert values[0] == values[1] != values[2]
    assert worlds[world][0]["fp16-overflow"][0]["scaler"]["scale"] == 512


def test_dtype_casts_model_and_inputs(seen):
    assert seen["plain"]["dtypes"] == ["torch.float64"] and seen["float32"]["dtypes"] == ["torch.float32"]
    assert 1e-9 < distance(seen["plain"], seen["float32"]) < 1e-4


def test_activation_checkpointing_computes_blocks_twice_and_changes_no_bit(seen):
    assert (seen["kept"]["forwards"], seen["recomputed"]["forwards"]) == (3 * UPDATES, 2 * 3 * UPDATES)
    assert distance(seen["recomputed"], seen["kept"]) == 0


# ------------------------------------------------------------------ order, length, log, checkpoints


def test_the_seed_decides_weights_and_order(seen):
    assert distance(seen["seed-0"], seen["seed-0-again"]) == 0
    assert distance(seen["seed-0"], seen["seed-1"]) > 1e-3


def test_the_same_configuration_twice_gives_the_same_bits(worlds, world):
    """The configuration has shuffling, dropout, AdamW, clipping and accumulation."""
    for once, twice in zip(worlds[world][0]["logged-once"], worlds[world][0]["logged-twice"], strict=True):
        assert once["weights"] == twice["weights"] and once["lines"] == twice["lines"]
        assert len({row["loss"] for row in once["lines"]}) == UPDATES


def test_a_script_draws_as_if_the_trainer_had_not_drawn_and_the_trainer_as_if_the_script_had_not(worlds, world):
    for rank in worlds[world][0]["among-own-draws"]:
        assert rank["drawn"] == rank["expected"]
    whole, parts = worlds[world][0]["dropping"], worlds[world][0]["among-own-draws"]
    assert distance(parts[0], whole[0]) == 0


def test_a_profiler_of_the_users_sees_the_models_operators(seen):
    assert seen["profiled"] == {
        "whole": {"aten::tanh": UPDATES, "TanhBackward0": UPDATES},
        "parts": {"aten::tanh": 2, "TanhBackward0": 2},
    }


def test_sparse_gradients_are_rescaled_clipped_and_measured_as_dense_ones(seen):
    assert distance(seen["sparse"], seen["dense"]) < 1e-9
    norms = [[metrics["grad_norm"] for _, _, metrics in seen[case]["logged"]] for case in ("sparse", "dense")]
    assert norms[0] == pytest.approx(norms[1], abs=1e-9) and min(norms[0]) > 0.3


def test_a_trained_model_with_sparse_gradients_is_as_it_was_for_a_wrapper_of_the_scripts(worlds):
    assert worlds[2][0]["sparse-afterwards"][0]["left out"] == [None, ["head.0.bias"]]


def test_shuffle_changes_the_order(seen):
    assert distance(seen["plain"], seen["shuffled"]) > 1e-6


def test_early_stopping_waits_for_its_patience(seen):
    assert (seen["early"]["stop_reason"], len(seen["early"]["rows"])) == ("early_stopping", 3)
    assert (seen["early-loss"]["stop_reason"], len(seen["early-loss"]["rows"])) == ("early_stopping", 2)


def test_max_steps_counts_updates(seen):
    assert seen["max-steps"]["steps"] == 5 and agrees(seen["max-steps"], by_hand([0.1] * 5))


def test_one_rank_that_asks_in_a_step_stops_all_after_the_same_one(worlds, world):
    ranks = worlds[world][0]["asked-in-a-step"]
    assert {rank["stop_reason"] for rank in ranks} == {"asked in step 2"}
    (steps,) = {rank["steps"] for rank in ranks}
    assert steps == 2 if world == 1 else 2 <= steps < 4 * 10**4
    assert ranks[0]["checkpoints"][-1] == f"step-{steps:08d}" and ranks[0]["rows"][-1]["step"] == steps


def test_log_lines_come_every_n_updates_and_at_the_end_of_an_epoch(seen):
    assert [step for step, _, _ in seen["logged-by-threes"]["logged"]] == [3, 4, 6, 8]


def test_deterministic_refuses_what_is_not(seen):
    assert "does not have a deterministic implementation" in seen["deterministic"]["error"]
    assert seen["nondeterministic"]["steps"] == UPDATES


def steps_of(case):
    return [int(name.removeprefix("step-")) for name in case["checkpoints"]]


def test_checkpoints_come_when_asked_and_go_where_asked(seen):
    assert steps_of(seen["by-epochs"]) == [8, 12]
    assert steps_of(seen["by-steps"]) == [5, 10, 12]
    assert steps_of(seen["at-start"]) == [0, 12]
    assert len(steps_of(seen["elsewhere"])) == 3


def test_checkpoints_by_the_clock_never_keep_training_from_going_on(seen):
    steps = steps_of(seen["by-time"])
    assert len(steps) >= 3 and steps[-1] == seen["by-time"]["steps"] > steps[0] > 0


def test_validations_by_the_clock_are_at_the_same_steps_on_all_ranks(worlds, world):
    ranks = worlds[world][0]["validated-by-time"]
    steps = [[row["step"] for row in rank["rows"]] for rank in ranks]
    assert steps == [steps[0]] * world and len(steps[0]) >= 3
    assert all("val_loss" in row for row in ranks[0]["rows"])


def test_the_newest_checkpoints_are_kept_and_the_best(seen):
    assert steps_of(seen["newest"]) == [16, 20] and steps_of(seen["newest-and-best"]) == [4, 16, 20]


def test_validation_uses_the_buffers_that_the_checkpoint_holds(worlds, world):
    """Batch statistics differ between ranks after a forward pass. The model has those of the main process."""
    ranks = worlds[world][0]["batch-norm"]
    assert [rank["val_by_hand"] for rank in ranks] == [ranks[0]["val_by_hand"]] * world
    assert ranks[0]["rows"][-1]["val_loss"] == pytest.approx(ranks[0]["val_by_hand"], abs=1e-12)


# ------------------------------------------------------------------ options of DDP


@pytest.mark.parametrize("case", ["one-bucket", "small-buckets", "small-buckets-accumulated", "static-accumulated"])
def test_an_update_takes_one_all_reduce_per_bucket_also_in_a_short_last_group(ddp, case):
    """DDP learns its buckets in the first update."""
    buckets = len(ddp[case]["rebuilt_bucket_sizes"].split(","))
    assert [number for number, _ in ddp[case]["counts"][1:]] == [buckets] * (UPDATES - 1)
    micros = {"small-buckets-accumulated": [3, 3, 3, 2], "static-accumulated": [3, 3, 3, 2]}.get(case, [1] * 4)
    assert [micro for _, micro in ddp[case]["counts"]] == micros * 2


def test_bucket_cap_mb_decides_the_number_of_buckets(ddp):
    assert [len(ddp[case]["rebuilt_bucket_sizes"].split(",")) for case in ("one-bucket", "small-buckets")] == [1, 3]


def test_static_graph_is_told_to_ddp_and_changes_no_number(ddp):
    assert ddp["static"]["static_graph"] and not ddp["one-bucket"]["static_graph"]
    assert distance(ddp["static"], ddp["one-bucket"]) == 0
    assert distance(ddp["static-accumulated"], ddp["one-bucket"]) < 1e-12


def test_a_gradient_in_two_pieces_is_refused_or_waited_for(worlds):
    one, two = by_case(worlds, 1), by_case(worlds, 2)
    assert two["twice"]["error"].startswith("ConfigError: shared.bias got a second gradient in one backward pass")
    assert distance(two["twice-static"], one["twice"]) < 1e-9


def test_unused_parameters_need_their_option(ddp):
    names = "ConfigError: no gradient for unused.weight, unused.bias: a forward that does not use every parameter needs"
    for case in ("unused", "unused-at-last"):
        assert ddp[case]["error"].startswith(f"{names} ddp.find_unused_parameters=true"), ddp[case]["error"]
        assert "\n" not in ddp[case]["error"]
    assert ddp["unused-found"]["steps"] == UPDATES
    assert (
        distance(
            ddp["unused-found"] | {"weights": ddp["unused-found"]["weights"][: len(ddp["plain"]["weights"])]},
            ddp["plain"],
        )
        == 0
    )


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_a_compressing_hook_is_close_to_none_and_not_equal(ddp, hook):
    assert 1e-7 < distance(ddp[f"hook-{hook}"], ddp["hook-none"]) < 0.02


def test_powersgd_is_close_to_none_and_not_equal(ddp, worlds):
    assert 1e-5 < distance(ddp["hook-powersgd"], ddp["no-powersgd"]) < 0.5
    assert "ddp.comm_hook=powersgd compresses from update 21 on" in worlds[2][1]


def test_powersgd_begins_when_asked_and_keeps_as_much_as_asked(ddp):
    plain = ddp["no-powersgd"]
    assert distance(ddp["powersgd-later"], plain) == 0
    assert 0 < distance(ddp["powersgd-rank-2"], plain) < distance(ddp["hook-powersgd"], plain)
    assert "ddp.powersgd_rank=2 has no effect without ddp.comm_hook='powersgd'" in ddp["powersgd-rank-alone"]["error"]


def test_powersgd_is_resumed_exactly(ddp):
    assert ddp["powersgd-resumed"]["files"] == ["rank-0.safetensors", "rank-1.safetensors"]
    assert distance(ddp["powersgd-resumed"], ddp["hook-powersgd"]) == 0


def test_powersgd_goes_on_in_a_second_fit(ddp):
    assert distance(ddp["powersgd-twice"], ddp["hook-powersgd"]) == 0


def test_powersgd_forgets_what_a_nan_has_spoilt(ddp):
    assert ddp["powersgd-spoilt"]["skipped"] == [23]
    assert all(map(math.isfinite, ddp["powersgd-spoilt"]["weights"]))


def test_powersgd_takes_one_bucket(ddp):
    assert ddp["powersgd-buckets"]["error"].startswith("ConfigError: ddp.bucket_cap_mb=1.0 has no effect with")


# ------------------------------------------------------------------ compile


@pytest.mark.full  # test_compile_cache.py compiles by default
def test_compile_compiles_and_changes_only_rounding(run_cli, tmp_path):
    """Takes about 15 s for the first graph of the inductor."""
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)
    done = run_cli(["train", "--script", str(script), "--run-dir", str(tmp_path / "run")], timeout=150)
    assert done.returncode == 0, done.output[-2000:]
    graphs, gap = (tmp_path / "seen").read_text().split()
    assert int(graphs) >= 1 and float(gap) < 1e-5


COMPILED = """
import pathlib
from torch._dynamo.utils import counters
from tests.conformance.jobs.options import BASE, case
from tests.conformance.jobs.recording import distance
from tests.conformance.jobs.options import FP32

eager = case(**FP32)()
assert not counters["stats"]["unique_graphs"]
compiled = case(**FP32, compile=True)()
seen = pathlib.Path(__file__).with_name("seen")
seen.write_text(f"{counters['stats']['unique_graphs']} {distance(eager, compiled)}")
"""


# ------------------------------------------------------------------ the launcher's own


def test_without_verbose_only_warnings_are_shown(run_cli, tmp_path):
    script = str(HERE / "jobs" / "failures.py")
    command = ["train", "--script", script, "--nproc-per-node", "2", "--no-verbose", "--run-dir", str(tmp_path / "run")]
    done = run_cli([*command, "--", "nan-skip", str(tmp_path)])
    shown = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert done.returncode == 0 and len(shown) == 1 and shown[0].startswith("warning: step 5: the loss is nan"), shown


def test_nodes_that_do_not_come_are_waited_for_no_longer_than_start_timeout(run_cli, tmp_path):
    where = ["--num-nodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = ["train", "--script", str(HERE / "jobs" / "failures.py"), "--run-dir", str(tmp_path / "run"), *where]
    done = run_cli([*command, "--nproc-per-node", "1", "--set", "start_timeout=1", "--", "no-data", str(tmp_path)])
    assert done.returncode == 1 and done.seconds < 30, done.output  # the default is 600 s
    assert "error: node 1 did not join within 1 s (start_timeout)" in done.stderr


def test_monitor_interval_is_the_longest_wait_between_two_looks():
    waited = []

    class Condition(contextlib.nullcontext):
        wait = staticmethod(waited.append)

    request = LaunchRequest("run", monitor_interval=0.7)
    verdicts = types.SimpleNamespace(_changed=Condition(), _is_news=lambda: False, _request=request)
    assert Verdicts.judge(verdicts, 0) is Verdict.AT_WORK
    assert waited == [0.7]


# ------------------------------------------------------------------ every setting is named here

HERE_TESTS, FAILURES = "conformance/test_options.py::", "conformance/test_failures.py::"
CONFIG, LAUNCH, RESUME = "unit/test_config.py::", "cli/test_launch.py::", "conformance/test_resume.py::"
ELASTIC = "cli/test_elastic.py::"
PROCESSES = CONFIG + "test_processes_follow_the_machine_unless_they_are_given"
SCALER = HERE_TESTS + "test_fp16_starts_at_its_scale_and_doubles_it_after_so_many_updates"
MLFLOW = "conformance/test_mlflow.py::"
NAMED = "unit/test_named_optimizers.py::"
VALIDATED = "unit/test_validation.py::"
EARLY = HERE_TESTS + "test_early_stopping_waits_for_its_patience"
ASKED = HERE_TESTS + "test_checkpoints_come_when_asked_and_go_where_asked"
KEPT = HERE_TESTS + "test_the_newest_checkpoints_are_kept_and_the_best"
JOINED = HERE_TESTS + "test_nodes_that_do_not_come_are_waited_for_no_longer_than_start_timeout"
BATCHES = CONFIG + "test_any_two_of_the_three_give_the_third"
SHARDED = "conformance/test_fsdp.py::"
RAY = "conformance/test_ray.py::"
ZERO = "conformance/test_deepspeed.py::"
MIRRORED = "conformance/test_tensorflow.py::test_two_devices_of_one_process_give_the_weights_of_one"
ZERO_FILES = "conformance/test_deepspeed_files.py::"
HOOKS = "conformance/test_comm_hooks.py::"
HOROVOD = "conformance/test_horovod.py::"
BOARD = "conformance/test_tensorboard.py::"
SCHEDULE = "unit/test_profiling.py::test_the_schedule_waits_warms_up_and_records"
TESTED = {  # setting -> a test of its effect or of its refusal
    "backend": PROCESSES,
    "num_gpus": PROCESSES,
    "num_nodes": LAUNCH + "test_two_nodes_run_and_restart_together",
    "gpus_per_node": CONFIG + "test_processes_that_do_not_fit_are_an_error_with_the_fix",
    "nproc_per_node": PROCESSES,
    "device": PROCESSES,
    "node_rank": LAUNCH + "test_two_nodes_run_and_restart_together",
    "master_addr": JOINED,
    "master_port": LAUNCH + "test_two_nodes_run_and_restart_together",
    "address": RAY + "test_an_existing_cluster_is_joined_by_its_address",
    "communication_backend": "cli/test_capabilities.py::test_a_condition_is_what_refuses",
    "timeout_s": FAILURES + "test_a_rank_that_stays_away_is_waited_for_no_longer_than_timeout_s",
    "start_timeout": JOINED,
    "min_nodes": ELASTIC + "test_nodes_go_and_come",
    "min_nproc_per_node": ELASTIC + "test_killed_workers_are_missing_until_the_interval_is_over",
    "elastic_interval_s": ELASTIC + "test_killed_workers_are_missing_until_the_interval_is_over",
    "wait": "cli/test_ray_cluster.py::test_nodes_are_waited_for_and_a_lost_one_is_replaced",
    "node_timeout": "cli/test_many_nodes.py::test_a_link_that_stays_down_ends_both_nodes_in_time_and_names_the_other",
    "monitor_interval": HERE_TESTS + "test_monitor_interval_is_the_longest_wait_between_two_looks",
    "max_restarts": LAUNCH + "test_no_restart_is_left_for_a_worker_that_always_dies",
    "hang_timeout": RESUME + "test_a_rank_that_hangs_is_named_and_changes_no_bit",
    "hang_timeout_slow": RESUME + "test_a_save_that_hangs_has_a_limit_of_its_own",
    "restart_on_exception": LAUNCH + "test_an_exception_restarts_where_asked",
    "max_failed_saves": "unit/test_checkpoint.py::test_max_failed_saves_is_the_number_that_ends_training",
    "auto_micro_batch": "conformance/test_out_of_memory.py::test_half_the_micro_batch_gives_the_weights_of_a_run_that_began_with_it",
    "nan_policy": FAILURES + "test_a_nan_may_leave_the_update_out",
    "seed": HERE_TESTS + "test_the_seed_decides_weights_and_order",
    "deterministic": HERE_TESTS + "test_deterministic_refuses_what_is_not",
    "shuffle": HERE_TESTS + "test_shuffle_changes_the_order",
    "epochs": RESUME + "test_a_finished_run_copied_elsewhere_goes_on_for_more_epochs",
    "max_steps": HERE_TESTS + "test_max_steps_counts_updates",
    "batch_size": BATCHES,
    "global_batch_size": BATCHES,
    "gradient_accumulation_steps": HERE_TESTS + "test_accumulation_changes_no_number",
    "init_from": "unit/test_weights.py::test_a_run_starts_from_the_weights_alone",
    "dtype": HERE_TESTS + "test_dtype_casts_model_and_inputs",
    "validate_every_n_steps": VALIDATED + "test_validations_are_at_their_steps_and_at_the_end_and_each_has_a_row",
    "validate_every_s": HERE_TESTS + "test_validations_by_the_clock_are_at_the_same_steps_on_all_ranks",
    "validate_at_start": VALIDATED + "test_validations_are_at_their_steps_and_at_the_end_and_each_has_a_row",
    "max_validation_batches": VALIDATED + "test_a_validation_reads_the_first_batches",
    "early_stopping_patience": EARLY,
    "monitor": EARLY,
    "monitor_mode": EARLY,
    "optimizer": NAMED + "test_a_named_optimizer_makes_the_updates_of_torchs_own",
    "weight_decay": NAMED + "test_a_named_optimizer_makes_the_updates_of_torchs_own",
    "betas": NAMED + "test_a_named_optimizer_makes_the_updates_of_torchs_own",
    "momentum": NAMED + "test_a_named_optimizer_makes_the_updates_of_torchs_own",
    "layer_rates": NAMED + "test_layer_rates_apply_to_the_longest_start_of_a_name",
    "scheduler": NAMED + "test_a_named_schedule_follows_its_curve_over_the_updates_of_the_run",
    "scheduler_steps": NAMED + "test_a_run_that_was_cut_off_goes_on_bit_for_bit_with_the_length_of_its_schedule",
    "min_learning_rate": NAMED + "test_a_named_schedule_follows_its_curve_over_the_updates_of_the_run",
    "scheduler_power": NAMED + "test_the_curves_have_their_shapes",
    "scheduler_decay_ratio": NAMED + "test_the_curves_have_their_shapes",
    "learning_rate": HERE_TESTS + "test_a_set_rate_replaces_that_of_an_optimizer_and_its_schedule",
    "lr_scaling": HERE_TESTS + "test_the_rate_is_scaled_for_default_and_given_optimizers_and_their_schedules",
    "warmup_steps": HERE_TESTS + "test_warmup_raises_the_rate_over_its_updates",
    "warmup_start": HERE_TESTS + "test_a_warmup_with_a_start_rises_by_the_same_factor_each_update",
    "scheduler_interval": HERE_TESTS + "test_a_schedule_may_count_epochs",
    "gradient_clipping": HERE_TESTS + "test_clipping_is_by_the_global_norm_before_the_update",
    "mixed_precision": HERE_TESTS + "test_bf16_computes_in_bfloat16_and_keeps_float32_weights",
    "scaler_init_scale": SCALER,
    "scaler_growth_interval": SCALER,
    "activation_checkpointing": HERE_TESTS + "test_activation_checkpointing_computes_blocks_twice_and_changes_no_bit",
    "compile": HERE_TESTS + "test_compile_compiles_and_changes_only_rounding",
    "checkpoint_dir": ASKED,
    "resume_from_checkpoint": RESUME + "test_a_path_to_resume_from_may_be_a_run_or_a_checkpoint",
    "checkpoint_at_start": ASKED,
    "checkpoint_frequency": ASKED,
    "checkpoint_every_n_steps": ASKED,
    "checkpoint_every_s": HERE_TESTS + "test_checkpoints_by_the_clock_never_keep_training_from_going_on",
    "checkpoint_trainable_only": "conformance/test_trainable_only.py::test_they_travel_in_float64",
    "checkpoint_async": "unit/test_checkpoint_async.py::test_a_fit_has_the_checkpoints_weights_and_events_of_one_that_saves_at_once",
    "snapshot_every_n_steps": "conformance/test_snapshots.py::test_a_killed_worker_costs_at_most_one_step_and_no_bit",
    "keep_latest_k": KEPT,
    "keep_best": KEPT,
    "log_every_n_steps": HERE_TESTS + "test_log_lines_come_every_n_updates_and_at_the_end_of_an_epoch",
    "verbose": HERE_TESTS + "test_without_verbose_only_warnings_are_shown",
    "loggers": "unit/test_named_loggers.py::test_names_switch_loggers_on",
    "mlflow_tracking": MLFLOW + "test_a_run_is_complete_at_mlflow_and_nothing_lies_in_the_working_directory",
    "mlflow_experiment": MLFLOW + "test_a_run_that_fails_or_is_stopped_says_so",
    "mlflow_checkpoint": MLFLOW + "test_scaling_is_measured_against_the_run_of_one_process",
    "mlflow_register_model": MLFLOW + "test_a_registered_model_opens_without_a_pickle",
    "tensorboard": BOARD + "test_hyperparameters_graph_and_histograms",
    "tensorboard_dir": "unit/test_tensorboard.py::test_runs_below_one_directory_keep_apart_and_a_resume_finds_its_own",
    "tensorboard_histograms": BOARD + "test_pieces_on_several_processes_make_the_same_histograms",
    "profile": BOARD + "test_the_profile_is_a_trace_of_each_rank_and_says_what_costs_most",
    "profile_wait": SCHEDULE,
    "profile_warmup": SCHEDULE,
    "profile_active": SCHEDULE,
    "ddp.find_unused_parameters": HERE_TESTS + "test_unused_parameters_need_their_option",
    "ddp.bucket_cap_mb": HERE_TESTS + "test_bucket_cap_mb_decides_the_number_of_buckets",
    "ddp.static_graph": HERE_TESTS + "test_static_graph_is_told_to_ddp_and_changes_no_number",
    "ddp.comm_hook": HERE_TESTS + "test_a_compressing_hook_is_close_to_none_and_not_equal",
    "ddp.powersgd_rank": HERE_TESTS + "test_powersgd_begins_when_asked_and_keeps_as_much_as_asked",
    "ddp.powersgd_start_step": HERE_TESTS + "test_powersgd_begins_when_asked_and_keeps_as_much_as_asked",
    "ddp.topk_ratio": HOOKS + "test_topk_sends_no_more_than_its_part",
    "ddp.hierarchical_group_size": HOOKS + "test_the_groups_are_those_asked_for_or_the_nodes",
    "fsdp.wrap_classes": SHARDED + "test_the_options_choose_what_is_cut_on_its_own",
    "fsdp.min_num_params": SHARDED + "test_the_options_choose_what_is_cut_on_its_own",
    "fsdp.reshard_after_forward": SHARDED
    + "test_gathered_parameters_are_freed_after_the_forward_unless_told_otherwise",
    "fsdp.cpu_offload": SHARDED
    + "test_offloaded_parameters_train_as_others_and_on_cpus_it_is_said_that_nothing_is_freed",
    "fsdp.reduce_dtype": SHARDED + "test_mixed_precision_moves_weights_by_its_rounding_alone",
    "ray.engine": RAY + "test_fit_of_a_plain_script_brings_the_weights_back",
    "ray.cpus_per_worker": RAY + "test_an_existing_cluster_is_joined_by_its_address",
    "ray.report_to_tune": RAY + "test_a_trial_of_ray_tune_trains_in_its_own_placement_group",
    "ray.callbacks": RAY + "test_killed_it_starts_again_ends_in_the_bits_of_ddp_and_tells_ray_of_each_epoch_once",
    "horovod.compression": HOROVOD
    + "test_compressed_gradients_are_close_and_not_equal_by_word_and_by_horovods_own_object",
    "horovod.adasum": HOROVOD + "test_adasum_combines_as_its_paper_says_under_mpirun_and_is_refused_elsewhere",
    "horovod.timeline": HOROVOD + "test_the_timeline_is_a_file_of_the_run_and_whole",
    "tensorflow.strategy": MIRRORED,
    "tensorflow.num_devices": MIRRORED,
    "horovod.keras_backend": "conformance/test_keras_engines.py::test_a_keras_script_trains_as_in_one_process_on_torch",
    "deepspeed.zero_stage": ZERO + "test_the_optimizer_state_is_cut_over_the_processes",
    "deepspeed.offload_optimizer": ZERO + "test_any_number_of_processes_and_offloading_change_no_number",
    "deepspeed.offload_param": ZERO + "test_any_number_of_processes_and_offloading_change_no_number",
    "deepspeed.native_checkpoint": ZERO_FILES + "test_deepspeeds_tools_find_our_weights_without_our_package",
    "deepspeed.cpu_adam": ZERO + "test_the_cxx_adam_is_compiled_once_though_a_build_was_killed_before",
    "deepspeed.deepspeed_config": ZERO + "test_the_users_own_config_trains_as_settings_of_ours_that_say_the_same",
    "data.presharded": "unit/test_loading_streams.py::test_uneven_presharded_parts_are_used_once",
    "data.shard_streams": "unit/test_divided_streams.py::test_a_wrong_hook_is_refused_in_one_line",
    "data.remove_unused_columns": "unit/test_hugging_face_data.py::test_columns_that_the_model_does_not_take_are_dropped_and_said_once",
}


def test_every_setting_has_a_test_that_exists():
    options = {f"{group}.{name}" for group in GROUPS for name in group_options(group).__dataclass_fields__}
    assert set(TESTED) == set(DistributedConfig.__dataclass_fields__) - set(GROUPS) | options
    for setting, place in TESTED.items():
        path, _, name = place.partition("::")
        tree = ast.parse((HERE.parent / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, (setting, place)
