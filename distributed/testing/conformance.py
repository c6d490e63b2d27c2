"""Conformance checks for every adapter, with real processes: `python -m distributed.testing BACKEND`, or one pytest
test per check.

    references = train_references(Adapter("fsdp"), directory / "one")
    ran = train_cases(Adapter("fsdp"), 2, directory / "fsdp-2")
    for check in checks_for(ran.adapter).values():
        check(ran, references)

Every check raises AssertionError with what is wrong. If the engine supports float64, the numbers must agree within 1e-9
with those of one process. Otherwise they may differ by at most three times the change that float32 causes in one
process.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from distributed.checkpoints.manifest import step_name
from distributed.checkpoints.state_file import read_state
from distributed.parity.comparison import FIRST_LOSS, FLOORS, farthest
from distributed.testing.adapter import Adapter
from distributed.testing.jobs.cases import CUT_OFF, STOP_REASON
from distributed.testing.running import Case, Ran, References, has_compiled, refused_cases

EXACT = 1e-9
SAME_EVERYWHERE = (
    "adamw", "sgd-schedule-clip-warmup", "accumulation", "accumulation-clip", "sum-count", "unreduced", "tiny-last",
    "empty-slices", "stream", "class-weights", "ignored", "epoch-schedule", "scaled-rate", "in-order", "kept", "recomputed",
    "repeatable", "left-out", "stopped-early", "stopped-by-one", "whole", "one-update", "one-clipped-update", "cut-off", "resumed",
    "named", "named-sgd", "validation-points", "averaged", "frozen", "sampled", "several", "started-from",
)  # fmt: skip
_NUMBERS = ("loss", "val_loss", "again", "predicted", "norms", "measured")
_SEEDS = range(4)
_CLIP = 0.05  # the value that jobs/cases.py uses
# A bfloat16 number has 8 binary digits, so rounding changes it by at most 2**-8 of itself. A gradient that was rounded to
# bfloat16 differs by more than a quarter of 2**-8. Rounding to fp16 changes a gradient an eighth as much, and float32 hardly
# at all. No tensor may differ by more than four times 2**-8: the measured differences were 1.2 times on average and at most
# 2.0 times. A gradient that is wrong by two per cent is detected.
BF16_ROUNDING = 2.0**-8

Check = Callable[[Ran, References], None]


def check_same_numbers(name: str, ran: Ran, references: References) -> None:
    """Check that weights, losses, validation, predictions and gradient norms equal those of one process on the joint
    batches."""
    one, many = references.like(ran).case(name), ran.case(name)
    assert one.numbers["steps"] == many.numbers["steps"] > 0, f"{ran}, {name}: another number of updates"
    assert one.numbers["accuracy"] == many.numbers["accuracy"] or ran.dtype == "float32", f"{ran}, {name}: accuracy"
    limit = limit_of(ran, references)
    _near(many.weights, one.weights, limit, f"{ran}, {name}: weights")
    for number in _NUMBERS:
        _near(_finite(many, number), _finite(one, number), limit, f"{ran}, {name}: {number}")
    reasons = {each["stop_reason"] for each in (*one.ranks, *many.ranks)}
    assert len(reasons) == 1, f"{ran}, {name}: stopped because of {reasons}"


def limit_of(ran: Ran, references: References) -> float:
    """Return the largest difference that is allowed."""
    return EXACT if ran.dtype == "float64" else FLOORS * _rounding(references)


@functools.cache
def _rounding(references: References) -> float:
    """Return the largest change of the weights that float32 causes in one process."""
    names = same_numbers_for(references.float64.adapter)
    pairs = [(references.float32.case(name), references.float64.case(name)) for name in names]
    return max(farthest(one.weights, other.weights) for one, other in pairs)


def check_a_big_batch_may_be_cut(ran: Ran, references: References) -> None:
    """Check that k micro-batches make the same update as one batch."""
    one = references.like(ran).case("adamw")
    _near(ran.case("accumulation").weights, one.weights, limit_of(ran, references), f"{ran}: accumulated")


def check_scaled_rate(ran: Ran, references: References) -> None:
    """Check that `lr_scaling` multiplies the learning rate by global_batch_size / batch_size."""
    one = references.like(ran).case("adamw")
    _near(ran.case("scaled-rate").weights, one.weights, limit_of(ran, references), f"{ran}: lr_scaling")


def check_clipping(ran: Ran, references: References) -> None:
    """Check that the reported gradient norm is the one before clipping, and that the applied gradient has the
    requested norm."""
    free, clipped = ran.case("one-update"), ran.case("one-clipped-update")
    (norm,), (reported,) = free.numbers["norms"], clipped.numbers["norms"]
    assert norm > 2 * _CLIP and math.isclose(reported, norm, rel_tol=1e-5), f"{ran}: norms {norm} and {reported}"
    squares = sum(float(((value - clipped.weights[name]) ** 2).sum()) for name, value in free.weights.items())
    assert math.isclose(math.sqrt(squares), norm - _CLIP, rel_tol=1e-4), f"{ran}: clipped to another norm than {_CLIP}"


def check_resume(ran: Ran, references: References) -> None:
    """Check that a run that was cut off in the middle of an epoch and resumed ends with the same bits. This includes
    metrics over the whole epoch."""
    whole, resumed = ran.case("whole"), ran.case("resumed")
    assert ran.case("cut-off").numbers["steps"] < whole.numbers["steps"] == resumed.numbers["steps"]
    _near(resumed.weights, whole.weights, 0.0, f"{ran}: resumed")
    _near({"metrics": resumed.numbers["measured"]}, {"metrics": whole.numbers["measured"]}, 0.0, f"{ran}: resumed")
    _near(ran.case("named-resumed").weights, ran.case("named").weights, 0.0, f"{ran}: resumed with a named schedule")
    points, resumed = ran.case("validation-points"), ran.case("points-resumed")
    assert ran.case("points-cut-off").numbers["steps"] < points.numbers["steps"] == resumed.numbers["steps"]
    _near(resumed.weights, points.weights, 0.0, f"{ran}: resumed with several validation sets")
    found, wanted = ({"val_loss": each.numbers["val_loss"]} for each in (resumed, points))
    _near(found, wanted, 0.0, f"{ran}: resumed with several validation sets")
    if "averaged" not in refused_cases(ran.adapter):
        _near(ran.case("averaged-resumed").weights, ran.case("averaged").weights, 0.0, f"{ran}: resumed with averages")
    if "several" not in refused_cases(ran.adapter):
        _near(ran.case("several-resumed").weights, ran.case("several").weights, 0.0, f"{ran}: several models resumed")


def check_samples(ran: Ran, references: References) -> None:
    """Check that samples of the model and counted FLOPs change no bit of the weights, and equal those of one process."""
    if "sampled" in refused_cases(ran.adapter):
        return
    _near(ran.case("sampled").weights, ran.case("adamw").weights, 0.0, f"{ran}: sampled")
    found, wanted = (_samples(each) for each in (ran, references.like(ran)))
    assert found.keys() == wanted.keys() and len(wanted) == 7, f"{ran}: samples at {sorted(found)}"
    for step, (total, is_training) in wanted.items():
        assert is_training == found[step][1] == "0", f"{ran}: the model was not in evaluation mode"
        _near(
            {"sum": float(found[step][0])},
            {"sum": float(total)},
            2e-9 if ran.dtype == "float64" else 1e-3,
            f"{ran}: sample {step}",
        )
    flops = [_rows(each, "sampled", "metrics")[0] for each in (ran, references.like(ran))]
    per_sample = [row["flops_per_second"] / row["samples_per_second"] for row in flops]
    assert math.isclose(*per_sample, rel_tol=1e-9), f"{ran}: {per_sample} FLOPs per sample"


def _samples(ran: Ran) -> dict[int, list[str]]:
    """Return step -> words of the sample, without the prompt."""
    run_dir = Path(ran.case("sampled").ranks[0]["run_dir"])
    return {row["step"]: (run_dir / row["path"]).read_text().split()[2:] for row in _rows(ran, "sampled", "media")}


def _rows(ran: Ran, case: str, name: str) -> list[dict[str, Any]]:
    lines = (Path(ran.case(case).ranks[0]["run_dir"]) / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check_nan_is_left_out_everywhere(ran: Ran, references: References) -> None:
    """Check that a NaN on one rank skips the update on all ranks."""
    skipped = [rank["skipped"] for rank in ran.case("left-out").ranks]
    assert skipped == [[3]] * ran.world_size, f"{ran}: left out {skipped}"


def check_stop_by_one(ran: Ran, references: References) -> None:
    """Check that a stop requested by a callback on one rank ends training on all ranks after that step, and that the
    callback finds the model, the optimizer and the run directory in its context."""
    for name, rank in enumerate(ran.case("stopped-by-one").ranks):
        assert rank["stop_reason"] == STOP_REASON, f"{ran}: rank {name} stopped because of {rank['stop_reason']!r}"
        assert all(rank["context"]), f"{ran}: rank {name} found {rank['context']} for model, optimizer and run_dir"
    assert ran.case("stopped-by-one").numbers["steps"] == CUT_OFF, (
        f"{ran}: did not stop after the step in which the stop was requested"
    )
    result = json.loads((Path(ran.case("stopped-by-one").ranks[0]["run_dir"]) / "result.json").read_text())
    assert (result["status"], result["stop_reason"]) == ("finished", STOP_REASON), f"{ran}: {result}"


def check_bf16(ran: Ran, references: References) -> None:
    """Check that bfloat16 changes gradients only by its rounding, and weights as much as in one process. Pass if the
    adapter refuses bfloat16."""
    if not ran.adapter.takes(mixed_precision="bf16"):
        return
    half, one = ran.case("bf16"), references.float32
    check_bf16_gradient(*_gradients(ran, references), str(ran))
    moved, floor = _apart(half, one.case("float32")), _apart(one.case("bf16"), one.case("float32"))
    assert moved <= FLOORS * floor, f"{ran}: bf16 moves the weights by {moved}, and those of one process by {floor}"
    kinds = {str(value.dtype) for value in half.weights.values()}
    assert kinds == {"float32"}, f"{ran}: bf16 leaves weights of {kinds}"


def check_bf16_gradient(half: Mapping[str, Any], full: Mapping[str, Any], what: str) -> None:
    """Check that a gradient in bfloat16 differs from the full one, and that no tensor of it differs by more than
    rounding explains."""
    rounded = _length(half[name] - full[name] for name in full) / _length(full.values())
    assert rounded > BF16_ROUNDING / 4, f"{what}: bf16 moves the gradient by {rounded} of itself: it was not used"
    each = {name: _length([half[name] - full[name]]) / _length([full[name]]) for name in full}
    worst = max(each, key=lambda name: each[name])
    assert each[worst] <= 4 * BF16_ROUNDING, f"{what}: bf16 moves the gradient of {worst} by {each[worst]} of itself"


def _gradients(ran: Ran, references: References) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the adapter's gradient in bfloat16 and the gradient of one process in float32, for the same update.

    All runs use plain SGD with learning rates 1 and 2 and begin with the same weights, so differences of weights are
    gradients.
    """
    one = references.float32.case("float32-update").weights
    twice, half = references.float32.case("float32-double-update").weights, ran.case("bf16-update").weights
    full = {name: one[name] - twice[name] for name in one}
    return {name: full[name] + one[name] - half[name] for name in full}, full


def _length(tensors: Iterable[Any]) -> float:
    return math.sqrt(sum(float((tensor**2).sum()) for tensor in tensors))


def check_fp16(ran: Ran, references: References) -> None:
    """Check that float16 changes the weights only by its rounding, and that the loss scale is the requested one.
    Pass if the adapter refuses float16."""
    if not ran.adapter.takes(mixed_precision="fp16"):
        return
    half = ran.case("fp16")
    moved = _apart(half, references.float32.case("float32"))
    assert 1e-5 < moved < 0.1, f"{ran}: fp16 moves the weights by {moved}"  # float32 itself changes them by about 1e-6
    steps = int(half.numbers["steps"])
    checkpoint = Path(half.ranks[0]["run_dir"]) / "checkpoints" / step_name(steps)
    scaler = read_state(checkpoint)[1]["scaler"]
    found = scaler["scale"], scaler["_growth_tracker"], scaler["growth_interval"]
    assert found == (256.0 * 2 ** (steps // 3), steps % 3, 3), f"{ran}: the loss scale after {steps} updates is {found}"


def check_recomputed(ran: Ran, references: References) -> None:
    """Check that activation checkpointing computes the blocks twice and changes no bit. Pass if the adapter refuses
    it."""
    if "recomputed" in refused_cases(ran.adapter):
        return
    kept, recomputed = ran.case("kept"), ran.case("recomputed")
    counts = [(one["forwards"], other["forwards"]) for one, other in zip(kept.ranks, recomputed.ranks, strict=True)]
    assert all(other == 2 * one > 0 for one, other in counts), f"{ran}: forwards without and with it are {counts}"
    _near(recomputed.weights, kept.weights, 0.0, f"{ran}: recomputed")


def check_deterministic(ran: Ran, references: References) -> None:
    """Check that operations with varying results are refused on every rank once `deterministic` is set."""
    before, asked = ran.case("adamw").ranks, ran.case("repeatable").ranks
    assert not any(rank["deterministic"] for rank in before) and all(rank["deterministic"] for rank in asked), f"{ran}"


def check_compiled(ran: Ran, references: References) -> None:
    """Check that torch.compile makes graphs of the model on every rank and changes no number. Pass if the adapter
    refuses it."""
    if not has_compiled(ran.adapter, ran.world_size):
        return
    compiled, plain = ran.case("compiled"), ran.case("repeatable")
    graphs = [rank["graphs"] for rank in compiled.ranks]
    assert all(graphs) and not any(rank["graphs"] for rank in plain.ranks), f"{ran}: {graphs} graphs"
    _near(compiled.weights, plain.weights, limit_of(ran, references), f"{ran}: compiled")


def check_float32(ran: Ran, references: References) -> None:
    """Check that float32 results differ by at most three times the change that slicing the same batches causes in one process."""
    one, cut = references.float32, max(2, ran.world_size)
    moved = max(_apart(ran.case(f"fp32-{seed}"), one.case(f"fp32-{seed}")) for seed in _SEEDS)
    floor = max(_apart(one.case(f"fp32-{seed}-cut-{cut}"), one.case(f"fp32-{seed}")) for seed in _SEEDS)
    assert moved <= FLOORS * floor, f"{ran}: {moved} apart in float32, and cutting moves one process by {floor}"
    firsts = [[each.case(f"fp32-{seed}").ranks[0]["logged"][0][2] for seed in _SEEDS] for each in (ran, one)]
    apart = max(abs(a - b) for a, b in zip(*firsts, strict=True))
    assert apart < FIRST_LOSS, f"{ran}: the first losses are {apart} apart"


def check_one_writer(ran: Ran, references: References) -> None:
    """Check that all ranks receive the same numbers, and that the run directory has each of them once."""
    ranks = [rank["logged"] for rank in ran.case("whole").ranks]
    assert all(rank == ranks[0] for rank in ranks), f"{ran}: ranks got different numbers"
    run_dir = Path(ran.case("whole").ranks[0]["run_dir"])
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    written = [(row["split"], row["step"], row["loss"]) for row in rows]
    assert written == [(split, step, loss) for split, step, loss, _ in ranks[0]], f"{ran}: {run_dir}/metrics.jsonl"
    _check_times([json.loads(line) for line in (run_dir / "times.jsonl").read_text().splitlines()], rows, ran)


def _check_times(times: list[dict[str, float]], rows: list[dict[str, Any]], ran: Ran) -> None:
    """Check that each log line has complete times for its steps, and the time that each rank needed."""
    assert [row["step"] for row in times] == [row["step"] for row in rows if row["split"] == "train"], f"{ran}: times"
    for row in times:
        parts = [row.get(f"{name}_s", 0.0) for name in ("data", "compute", "communication", "checkpoint")]
        assert min(parts) >= 0 and abs(sum(parts) - row["step_s"]) < 1e-6, f"{ran}: {row}"
        ranks = [value for name, value in row.items() if name.startswith("rank_")]
        assert len(ranks) == ran.world_size and abs(sum(ranks) / len(ranks) - parts[0] - parts[1]) < 1e-6, (
            f"{ran}: {row}"
        )


def _apart(one: Case, other: Case) -> float:
    return farthest(one.weights, other.weights)


def _finite(case: Case, name: str) -> dict[str, Any]:
    """Return the numbers, and a mask of those that are not finite. The norm of a skipped update is NaN or infinite."""
    import numpy

    values = case.numbers[name]
    is_finite = numpy.isfinite(values)
    return {"values": numpy.where(is_finite, values, 0.0), "are none": ~is_finite * 1.0}


def _near(found: Mapping[str, Any], wanted: Mapping[str, Any], limit: float, what: str) -> None:
    apart = farthest(found, wanted)
    assert apart <= limit, f"{what} differ by {apart}, and {limit} is allowed"


def same_numbers_for(adapter: Adapter) -> list[str]:
    """Return the cases in which `adapter` must reproduce the numbers of one process: all but those that need a
    setting it refuses."""
    refused = refused_cases(adapter)
    return [name for name in SAME_EVERYWHERE if name not in refused]


def checks_for(adapter: Adapter) -> dict[str, Check]:
    """Return the checks that `adapter` must pass: name -> check(ran, references)."""
    numbers = {
        f"same numbers: {name}": functools.partial(check_same_numbers, name) for name in same_numbers_for(adapter)
    }
    return {**numbers, **_CHECKS}


def check_over_all_samples(ran: Ran, references: References) -> None:
    """Check that metrics over all samples equal those of the predictions of all samples at once.

    The metrics are F1, AUROC, perplexity, one that depends on the order of the samples, and one that is detected to be
    no mean.
    """
    case = ran.case("whole")
    found, expected = ({"metrics": case.numbers[name]} for name in ("found", "expected"))
    _near(found, expected, EXACT if ran.dtype == "float64" else 1e-5, f"{ran}: metrics over all samples")


_CHECKS: dict[str, Check] = {
    "a big batch may be cut": check_a_big_batch_may_be_cut,
    "scaled rate": check_scaled_rate,
    "clipping": check_clipping,
    "resume in the middle of an epoch": check_resume,
    "samples in hooks": check_samples,
    "nan is left out everywhere": check_nan_is_left_out_everywhere,
    "stop by one rank": check_stop_by_one,
    "bf16": check_bf16,
    "fp16": check_fp16,
    "recomputed": check_recomputed,
    "deterministic": check_deterministic,
    "compiled": check_compiled,
    "float32": check_float32,
    "one writer": check_one_writer,
    "over all samples": check_over_all_samples,
}
