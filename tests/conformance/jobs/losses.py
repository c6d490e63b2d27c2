"""Train every form of batch, model and loss in one process group.

Arguments: the directory for the results, and a prefix of the names of the cases (default: all cases).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers  # a model is imported where it is made: the test that reads the names of the cases makes none
from torch.utils.data import DataLoader, Dataset, TensorDataset

from distributed import ConfigError, Trainer
from distributed.backends._torch.objective import Objective
from tests.conformance.jobs.recording import facts, run_cases, train

SAMPLES, FEATURES, CLASSES, WORDS = 23, 6, 4, 30
generator = torch.Generator().manual_seed(3)
X = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
Y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
BASE = {"dtype": "float64", "global_batch_size": 8, "epochs": 2, "learning_rate": 1e-2, "log_every_n_steps": 1}


class Rows(Dataset):
    """Hold items of any kind."""

    def __init__(self, make: Any, count: int = SAMPLES) -> None:
        self.items = [make(i) for i in range(count)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def seeded(make: Any) -> Any:
    def build() -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return make()

    return build


def layers(outputs: int = CLASSES) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs))


class Named(torch.nn.Module):
    """Take one or two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(x if other is None else x * other)


class OwnLoss(torch.nn.Module):
    """Return a dict with the loss, like many research models."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.inner(x)
        return {"loss": F.cross_entropy(outputs, y), "scores": outputs}


@dataclasses.dataclass
class WithLoss:
    loss: torch.Tensor


def each(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def weighted(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    weights = 1.0 + targets.to(outputs.dtype) ** 2
    return (each(outputs, targets) * weights).sum(), weights.sum()


def rights(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).double()


STEPS = {
    "scalar": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    "unreduced": lambda model, batch: each(model(batch[0]), batch[1]),
    "pair": lambda model, batch: weighted(model(batch[0]), batch[1]),
    "object": lambda model, batch: WithLoss(F.cross_entropy(model(batch[0]), batch[1])),
}


def dict_step(model: Any, batch: Any) -> dict[str, Any]:
    outputs = model(batch[0])
    right = rights(outputs, batch[1])
    return {
        "loss": each(outputs, batch[1]),
        "right": right,
        "mean_right": right.mean(),
        "share": (right.sum(), len(right)),
    }


def tuples() -> TensorDataset:
    return TensorDataset(X, Y)


def case(model: Any, data: Any, val: Any = None, **settings: Any) -> Any:
    def run() -> dict[str, Any]:
        return train(seeded(model), data(), val() if val else data(), **{**BASE, **settings})

    return run


# ---------------------------------------------------------------- Hugging Face


def tiny_gpt() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def tiny_gpt_by_itself() -> torch.nn.Module:
    """Return a GPT that divides its loss by its own number of labels."""
    model = tiny_gpt()
    model.accepts_loss_kwargs = False
    return model


def tiny_bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES,
        )
    )  # fmt: skip


def sentence(index: int) -> dict[str, Any]:
    """Return ids whose length differs between samples. Every second sample of the first batch has no label."""
    own = torch.Generator().manual_seed(100 + index)
    ids = torch.randint(1, WORDS, (2 + index % 9,), generator=own)
    labels = torch.full_like(ids, -100) if index < 8 and index % 2 else ids.clone()
    return {"input_ids": ids, "labels": labels}


def pad(rows: list[dict[str, Any]]) -> Any:
    """Pad as DataCollator does: ids with 0, labels with -100, and a mask."""
    from transformers.tokenization_utils_base import BatchEncoding

    length = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, value: int) -> torch.Tensor:
        return torch.stack([F.pad(row[name], (0, length - len(row[name])), value=value) for row in rows])

    mask = torch.stack([(torch.arange(length) < len(row["input_ids"])).long() for row in rows])
    return BatchEncoding(
        {"input_ids": filled("input_ids", 0), "attention_mask": mask, "labels": filled("labels", -100)}
    )


def sentences() -> DataLoader:
    return DataLoader(Rows(sentence), collate_fn=pad)


def classified() -> Rows:
    def row(index: int) -> dict[str, torch.Tensor]:
        own = torch.Generator().manual_seed(100 + index)
        ids = torch.randint(1, WORDS, (6,), generator=own)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.sum() % CLASSES}

    return Rows(row)


def tied() -> dict[str, Any]:
    """Resume with another trainer from a checkpoint, which holds the tied weight once. The weights end the same."""
    whole = case(tiny_gpt, sentences, shuffle=False)()
    settings = {**BASE, "shuffle": False}
    first = Trainer(seeded(tiny_gpt), **settings)
    history = first.fit(sentences(), max_steps=4)
    path = Path(history.run_dir) / "checkpoints" / "step-00000004"
    second = Trainer(seeded(tiny_gpt), **settings, resume_from_checkpoint=str(path))
    with mock.patch.object(Objective, "probe") as probe:
        content = facts(second, second.fit(sentences())) | {"probed_again": probe.called}
    raw = (path / "model" / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    is_tied = second.model.lm_head.weight is second.model.transformer.wte.weight
    return {**content, "whole": whole["weights"], "stored": sorted(header), "is_tied": is_tied}


# ---------------------------------------------------------------- buffers


class Norms(torch.nn.Module):
    """Normalize over positions, so that one sample is enough, and count the training forward passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.head = torch.nn.Linear(FEATURES, CLASSES)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards += 1
        return self.head(self.norm(x.view(-1, 2, FEATURES // 2)).flatten(1))


def empty_slices() -> dict[str, Any]:
    """Return the buffers of this rank before and after each update, with its number of samples."""
    trainer = Trainer(seeded(Norms), **{**BASE, "global_batch_size": 3, "gradient_accumulation_steps": 2, "epochs": 1})
    step, seen = trainer.backend.train_step, []

    def buffers() -> list[float]:
        return [float(value.double().sum()) for value in trainer.backend.plain.buffers()]

    def watched(group: Any) -> Any:
        before = buffers()
        result = step(group)
        seen.append([[micro.num_samples for micro in group.micro_batches], before, buffers()])
        return result

    trainer.backend.train_step = watched
    return {**facts(trainer, trainer.fit(tuples())), "seen": seen}


def measured() -> dict[str, Any]:
    """Return metrics of all forms over an evaluation, and their values for all the data at once."""
    metrics = {
        "mean": lambda o, t: F.cross_entropy(o, t), "each": each, "pair": weighted,
        "number": lambda o, t: float((o.argmax(1) == t).double().mean()),
    }  # fmt: skip
    trainer = Trainer(seeded(layers), metrics=metrics, **BASE)
    history = trainer.fit(tuples(), tuples())
    found, outputs = trainer.evaluate(tuples()), trainer.predict(tuples())
    total, count = weighted(outputs, Y)
    expected = {
        "mean": float(F.cross_entropy(outputs, Y)), "each": float(each(outputs, Y).mean()), "pair": float(total / count),
        "number": float(rights(outputs, Y).mean()), "accuracy": float(rights(outputs, Y).mean()),
        "loss": float(F.cross_entropy(outputs, Y)),
    }  # fmt: skip
    return {**facts(trainer, history), "found": found, "expected": expected}


def now_and_then(model: Any, batch: Any) -> dict[str, Any]:
    """Return metrics whose names differ between batches and ranks: one for each class in the batch, and one in evaluation."""
    outputs = model(batch[0])
    right = rights(outputs, batch[1])
    named = {f"class_{k}": (right[batch[1] == k].sum(), int((batch[1] == k).sum())) for k in batch[1].unique().tolist()}
    own = {} if model.training else {"unseen_in_training": right}
    return {"loss": each(outputs, batch[1]), **named, **own}


# ---------------------------------------------------------------- predictions


@dataclasses.dataclass
class Scores:
    scores: torch.Tensor
    names: list[str]


class Answers(torch.nn.Module):
    """Return outputs of many forms. Each contains the first feature of its sample, which identifies the sample."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.unused = form, torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        first = x[:, :1]
        words = [f"{value:.6f}" for value in first.flatten().tolist()]
        return {
            "tensor": lambda: first,
            "mapping": lambda: {"first": first, "inner": {"twice": 2 * x, "nothing": None}},
            "tuple": lambda: (first, [x, words]),
            "object": lambda: Scores(first, words),
            "encoding": lambda: transformers.BatchEncoding({"first": first}),
            "words": lambda: words,
            "array": lambda: first.numpy(),
            "rows": lambda: first.expand(-1, 3).reshape(-1, 1),  # three rows for each sample
            "ragged": lambda: x[:, : 2 + len(x) % 2],
        }[self.form]()


def around() -> dict[str, Any]:
    """Train with a training_step that uses the model of the script instead of its argument."""
    net = seeded(layers)()
    return train(
        net, tuples(), tuples(), **BASE, training_step=lambda model, batch: F.cross_entropy(net(batch[0]), batch[1])
    )


def thawed() -> dict[str, Any]:
    """Train a layer from the second fit on."""
    net = seeded(layers)()
    net[0].requires_grad_(False)
    trainer = Trainer(net, **BASE)
    trainer.fit(tuples())
    net[0].requires_grad_(True)
    try:
        trainer.fit(tuples())
    except ConfigError as error:
        return {"error": f"ConfigError: {error}"}
    return {}


FORMS = ("tensor", "mapping", "tuple", "object", "encoding", "words", "array", "rows", "ragged")


def predicted() -> dict[str, Any]:
    answers = {form: Trainer(Answers(form), **BASE).predict(DataLoader(tuples(), batch_size=3)) for form in FORMS}
    kinds = {form: type(answer).__name__ for form, answer in answers.items()}
    answers["ragged"] = [row[:1] for row in answers["ragged"]]
    answers["encoding"], answers["object"] = answers["encoding"].data, vars(answers["object"])
    answers["array"] = answers["array"].tolist()
    return {"answers": answers, "kinds": kinds}


OUT = Path(sys.argv[1]) if len(sys.argv) > 1 and __name__ == "__main__" else Path()
CASES = {
    "tuple": case(layers, tuples),
    "dict": case(Named, lambda: Rows(lambda i: {"x": X[i], "label": Y[i]}), loss_fn=F.cross_entropy),
    "two-inputs": case(Named, lambda: TensorDataset(X, X.flip(0), Y)),
    "tensor-alone": case(lambda: layers(FEATURES), lambda: Rows(lambda i: X[i]), loss_fn=F.mse_loss),
    "tuple-of-one": case(lambda: layers(FEATURES), lambda: TensorDataset(X), loss_fn=F.mse_loss),
    "own-loss": case(OwnLoss, lambda: Rows(lambda i: {"x": X[i], "y": Y[i]})),
    "default-mse": case(lambda: layers(FEATURES), lambda: TensorDataset(X, X.flip(0))),
    "no-default": case(lambda: layers(FEATURES), lambda: TensorDataset(X, X.flip(0)[:, 0])),
    "one-column": case(lambda: layers(1), lambda: TensorDataset(X, X[:, 0])),
    "one-column-classes": case(lambda: layers(1), tuples),
    "column-of-classes": case(layers, lambda: TensorDataset(X, Y[:, None])),
    "whole-numbers": case(layers, lambda: TensorDataset(X, Y[:, None].expand(-1, CLASSES))),
    "no-targets": case(layers, lambda: TensorDataset(X)),
    "no-target-name": case(Named, lambda: Rows(lambda i: {"x": X[i], "wanted": Y[i]}), loss_fn=F.cross_entropy),
    "not-an-argument": case(Named, lambda: Rows(lambda i: {"x": X[i], "labels": Y[i]})),
    "loss-has-no-gradient": case(layers, tuples, loss_fn=lambda o, t: F.cross_entropy(o, t).item()),
    "loss-is-text": case(layers, tuples, loss_fn=lambda o, t: "0.5"),
    **{f"step-{name}": case(layers, tuples, training_step=step) for name, step in STEPS.items()},
    "step-dict": case(layers, tuples, training_step=dict_step),
    "step-now-and-then": case(layers, tuples, training_step=now_and_then),
    "step-none": case(layers, tuples, training_step=lambda model, batch: None),
    "step-without-loss": case(layers, tuples, training_step=lambda model, batch: {"error": model(batch[0]).sum()}),
    "step-names-epoch": case(
        layers, tuples, training_step=lambda model, batch: dict.fromkeys(("loss", "epoch"), model(batch[0]).sum())
    ),
    "loss-is-a-sum": case(layers, tuples, loss_fn=torch.nn.CrossEntropyLoss(reduction="sum")),
    "step-part": case(
        layers,
        tuples,
        training_step=lambda model, batch: F.cross_entropy(model[2](model[1](model[0](batch[0]))), batch[1]),
    ),
    "step-around": around,
    "step-forward": case(layers, tuples, training_step=lambda m, batch: F.cross_entropy(m.forward(batch[0]), batch[1])),
    "thawed": thawed,
    "step-model-output": case(tiny_gpt_by_itself, sentences, training_step=lambda model, batch: model(**batch)),
    "weighted": case(layers, tuples, loss_fn=weighted),
    "weighted-accumulated": case(layers, tuples, loss_fn=weighted, gradient_accumulation_steps=2),
    "metrics": measured,
    "gpt": case(tiny_gpt, sentences, shuffle=False),
    "gpt-accumulated": case(tiny_gpt, sentences, shuffle=False, gradient_accumulation_steps=2),
    "gpt-by-itself": case(tiny_gpt_by_itself, sentences, shuffle=False),
    "gpt-by-itself-accumulated": case(tiny_gpt_by_itself, sentences, shuffle=False, gradient_accumulation_steps=2),
    "bert": case(tiny_bert, classified),
    "bert-accumulated": case(tiny_bert, classified, gradient_accumulation_steps=2),
    "tied": tied,
    "empty-slices": empty_slices,
    "predicted": predicted,
}

if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    run_cases({name: run for name, run in CASES.items() if name.startswith(wanted)}, OUT)
