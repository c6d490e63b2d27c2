"""Every form of batch, model and loss gives the same weights on one process and on two, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conformance.jobs import losses as job
from tests.conformance.jobs.recording import distance, read
from tests.conformance.runs import FULL, OnFirstUse

pytestmark = pytest.mark.timeout(600)
# Batch norm depends on the slices of a batch. The other cases are errors.
DIFFER = {
    "empty-slices", "predicted", "no-default", "one-column", "one-column-classes", "column-of-classes", "whole-numbers",
    "no-targets", "no-target-name", "not-an-argument", "loss-is-text", "loss-has-no-gradient", "step-none",
    "step-without-loss", "step-names-epoch", "step-part", "step-around", "loss-is-a-sum", "thawed"}  # fmt: skip
SAME = sorted(set(job.CASES) - DIFFER)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, run_cli_once):
    """Return world size -> (case -> what each rank saw, the console's text).

    Each world takes about 6 s. The world of three trains only models with their own loss.
    """
    script = str(Path(__file__).parent / "jobs" / "losses.py")

    def start(world):
        names = "gpt" if world == 3 else ""
        out = tmp_path_factory.mktemp(f"world-{world}")
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
                names,
            ],
            timeout=250,
        )
        assert done.returncode == 0, done.output[-3000:]
        return read(out, world), done.stdout + done.stderr

    return OnFirstUse(start)


@pytest.mark.parametrize("case", SAME)
def test_two_processes_agree_with_one(worlds, case):
    (one,), two = worlds[1][0][case], worlds[2][0][case]
    assert one["steps"] == two[0]["steps"] == 6
    for rank in two:
        assert distance(one, rank) < 1e-9
        for mine, other in zip(one["rows"], rank["rows"], strict=True):
            shared = {name for name in mine if name != "samples_per_second"}
            assert shared == {name for name in other if name != "samples_per_second"}
            # These models compute their loss in float32.
            rounding = 1e-6 if "gpt" in case or case == "step-model-output" else 1e-9
            assert all(abs(mine[name] - other[name]) < rounding for name in shared)


@pytest.mark.parametrize(
    "case", ["tuple", "step-scalar", "step-unreduced", "step-object", "step-dict", "dict", "own-loss"]
)
def test_these_forms_say_the_same(worlds, case):
    assert distance(worlds[1][0][case][0], worlds[1][0]["tuple"][0]) < 1e-12


def test_a_pair_is_weighted_over_the_whole_batch_and_not_per_slice(worlds):
    cases = worlds[1][0]
    assert distance(cases["weighted"][0], cases["step-pair"][0]) < 1e-12
    assert distance(cases["weighted"][0], cases["weighted-accumulated"][0]) < 1e-12
    assert distance(cases["weighted"][0], cases["tuple"][0]) > 1e-3


@pytest.mark.parametrize("world", [1, 2])
def test_metrics_of_all_forms_are_what_they_are_on_all_the_data(worlds, world):
    for rank in worlds[world][0]["metrics"]:
        assert rank["found"] == pytest.approx(rank["expected"], abs=1e-12)


def test_a_steps_own_metrics_are_means_over_samples(worlds):
    row = worlds[2][0]["step-dict"][0]["rows"][-1]
    accuracy = worlds[1][0]["tuple"][0]["rows"][-1]["val_accuracy"]
    assert [row[f"val_{name}"] for name in ("right", "mean_right", "share")] == pytest.approx([accuracy] * 3)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "no-default",
            "targets float64[%d] do not determine a loss: give one, for example Trainer(model, loss_fn=",
        ),
        ("one-column", "squeeze the outputs, outputs.squeeze(-1), in the model, or unsqueeze the targets"),
        ("one-column-classes", "one output column cannot hold class scores"),
        ("column-of-classes", "squeeze the class indices, targets.squeeze(1), in the data set"),
        ("whole-numbers", "make the targets floats, targets.float(), for the mean squared error"),
        ("no-targets", "a sample has one element, so there are no targets: let the data yield (inputs, targets), pass"),
        (
            "not-an-argument",
            "the batch has 'labels', but forward(x, other) of Named does not: a batch of named tensors is passed as model(**batch), so pass"
            " loss_fn=..., which gets 'labels', or give a training_step(model, batch)",
        ),
        ("no-target-name", "the batch has the keys x, wanted and none of labels,"),
        ("loss-is-text", "type str is not a number, a tensor or a pair (sum, count)"),
        ("loss-has-no-gradient", "the loss has no gradient"),
        (
            "loss-is-a-sum",
            "CrossEntropyLoss(reduction='sum') makes gradients grow with the batch: use CrossEntropyLoss()",
        ),
        ("thawed", "0.weight was unfrozen after the first fit, and the optimizer does not follow: make a new Trainer"),
        ("step-none", "training_step returned None: return the loss"),
        ("step-without-loss", "training_step returned the keys error without 'loss': add it"),
        ("step-names-epoch", "a metric cannot be called 'epoch', which rows of a run use for something else"),
    ],
)
def test_what_is_no_loss_is_answered_with_the_fix(worlds, world, case, message):
    for rank in worlds[world][0][case]:
        assert rank["error"].startswith("ConfigError: ")
        assert (message % (8 // world) if "%d" in message else message) in rank["error"]


@pytest.mark.parametrize("world", [1, 2])
def test_a_metric_counts_where_it_is_reported(worlds, world):
    """The names of metrics differ between ranks and batches. `SAME` checks that two processes agree with one."""
    row, outputs = worlds[world][0]["step-now-and-then"][0]["rows"][-1], worlds[world][0]["tuple"][0]["rows"][-1]
    assert row["val_unseen_in_training"] == pytest.approx(outputs["val_accuracy"]) and "unseen_in_training" not in row
    counts = [int((k == job.Y).sum()) for k in range(job.CLASSES)]
    right = sum(row[f"val_class_{k}"] * count for k, count in enumerate(counts))
    assert right == pytest.approx(outputs["val_accuracy"] * job.SAMPLES)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("step-part", "training_step uses a part of `model`, which is wrapped on several processes ('Distributed"),
        ("step-around", "training_step never called its argument `model`, so no gradient was exchanged"),
    ],
)
def test_a_training_step_that_goes_around_the_wrapper_is_refused(worlds, case, message):
    assert all(message in rank["error"] for rank in worlds[2][0][case])
    assert "error" not in worlds[1][0][case][0]  # one process sends nothing


# ------------------------------------------------------------------ predictions


@pytest.mark.parametrize("world", [1, 2])
def test_predictions_of_any_form_come_in_the_order_of_the_samples(worlds, world):
    x, first = job.X.tolist(), [[value] for value in job.X[:, 0].tolist()]
    words = [f"{value:.6f}" for (value,) in first]
    for rank in worlds[world][0]["predicted"]:
        answers = rank["answers"]
        assert answers["tensor"] == answers["array"] == answers["ragged"] == first
        assert answers["mapping"] == {"first": first, "inner": {"twice": (2 * job.X).tolist(), "nothing": None}}
        assert answers["tuple"] == [first, [x, words]]
        assert answers["object"] == {"scores": first, "names": words} and answers["words"] == words
        assert answers["encoding"] == {"first": first}
        assert answers["rows"] == [value for value in first for _ in range(3)]
        kinds = ["Tensor", "dict", "tuple", "Scores", "BatchEncoding", "list", "ndarray", "Tensor", "list"]
        assert list(rank["kinds"].values()) == kinds


# ------------------------------------------------------------------ Hugging Face


def gpt_by_hand():
    """Return the result of plain torch on the joint batch, with the mean over all of its predicted tokens."""
    model = job.seeded(job.tiny_gpt)().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for start in [0, 8, 16] * 2:
        rows = [job.sentence(i) for i in range(start, min(start + 8, job.SAMPLES))]
        batch = job.pad(rows)
        scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).tolist()


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=FULL)])
@pytest.mark.parametrize("case", ["gpt", "gpt-accumulated", "gpt-by-itself", "gpt-by-itself-accumulated"])
def test_each_predicted_token_of_the_whole_batch_weighs_the_same(worlds, world, case):
    """The cases include a process without a label in its first batch, and a model that does not take the count as an argument.

    The loss is computed in float32, hence the bound of 1e-6 (measured: 4e-8). A miscounted token moves the weights by 1e-2.
    """
    assert distance(worlds[world][0][case][0], gpt_by_hand()) < 1e-6


def test_what_was_assumed_about_a_models_own_loss_is_said(worlds):
    assert worlds[2][1].count("the model's own loss is weighted by the number of labels that are not -100") >= 1


@pytest.mark.parametrize(("world", "trainers"), [(2, 7), pytest.param(3, 4, marks=FULL)])
def test_a_float64_model_with_a_float32_loss_is_told_of_once_each(worlds, world, trainers):
    """Four trainers have a GPT each. Two processes also train with a training_step, and twice with a tied weight.

    A resume shows no further notice. BERT and the other models compute their loss in the type of the model.
    """
    assert worlds[world][1].count("the model is float64 and computes its own loss in float32") == trainers


def test_a_classifier_reports_accuracy(worlds):
    row = worlds[2][0]["bert"][0]["rows"][-1]
    assert 0 <= row["accuracy"] <= 1 and (row["val_accuracy"] * job.SAMPLES) == pytest.approx(
        round(row["val_accuracy"] * job.SAMPLES)
    )


@pytest.mark.parametrize("world", [1, 2])
def test_a_tied_weight_is_stored_once_and_stays_tied(worlds, world):
    (case, *_) = worlds[world][0]["tied"]
    assert case["is_tied"] and distance(case, case["whole"]) == 0
    assert not case["probed_again"]  # a resume takes the form of the loss from the checkpoint
    stored = {"lm_head.weight", "transformer.wte.weight"} & set(case["stored"])
    assert len(stored) == 1


# ------------------------------------------------------------------ buffers


def test_a_slice_without_samples_leaves_no_trace_in_buffers(worlds):
    """The last buffer counts forward passes. Rank 1 begins each update with the buffers of the main process."""
    main, other = (rank["seen"] for rank in worlds[2][0]["empty-slices"])
    assert [slices for slices, _, _ in other] == [[1, 0]] * 7 + [[1]]
    for (slices, before, after), (own_slices, _, own_after) in zip(main, other, strict=True):
        assert after[-1] - before[-1] == len(slices)
        assert own_after[-1] - before[-1] == sum(own_slices)
