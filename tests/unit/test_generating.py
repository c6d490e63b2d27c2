"""Generated ids in evaluation: what metrics get, what training does not notice, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed import Trainer
from distributed.errors import ConfigError

transformers = pytest.importorskip("transformers")


def gpt(dropout: float = 0.0) -> Any:
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=11, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )
    )  # fmt: skip


ROWS = [
    {
        "input_ids": (torch.arange(4) + i) % 11,
        "attention_mask": torch.ones(4, dtype=torch.long),
        "labels": (torch.arange(4) + i) % 11,
    }
    for i in range(10)
]


def trained(**arguments: Any) -> tuple[Any, Any]:
    model = gpt(0.3)
    trainer = Trainer(model, batch_size=4, epochs=2, device="cpu", learning_rate=0.01, verbose=False, **arguments)
    return trainer.fit(ROWS, ROWS), model


def test_a_metric_gets_the_ids_after_the_prompt_of_all_samples() -> None:
    seen: list[tuple[Any, Any]] = []

    def score(ids: Any, labels: Any) -> float:
        seen.append((ids, labels))
        return float(ids.shape[1])

    history, model = trained(
        predict_with_generate=True, generation_config={"max_new_tokens": 5, "eos_token_id": 7}, metrics={"score": score}
    )
    assert [each["val_score"] for each in history.rows] == [5.0, 5.0] and "score" not in history.rows[0]
    inputs = torch.stack([row["input_ids"] for row in ROWS])
    config = transformers.GenerationConfig(max_new_tokens=5, eos_token_id=7, pad_token_id=0)
    own = model.eval().generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=config)[:, 4:]
    ids, labels = seen[-1]
    assert ids.shape == (10, 5) and torch.equal(ids[:, : own.shape[1]], own)
    assert labels.shape == (10, 5) and torch.equal(labels[:, :4], inputs) and set(labels[:, 4].tolist()) == {-100}


def test_sampling_repeats_and_leaves_the_random_numbers_of_training_alone() -> None:
    sampled = {"do_sample": True, "max_new_tokens": 4, "min_new_tokens": 4, "top_k": 0}
    found: list[Any] = []
    arguments = {"predict_with_generate": True, "generation_config": sampled}
    metrics = {"kept": lambda ids, labels: float(found.append(ids.tolist()) or 0)}
    _, one = trained(metrics=metrics, **arguments)
    _, again = trained(metrics=metrics, **arguments)
    _, plain = trained()
    assert found[:2] == found[2:] and len({tuple(row) for row in found[0]}) > 1
    for name, weight in plain.state_dict().items():
        assert torch.equal(one.state_dict()[name], weight) and torch.equal(again.state_dict()[name], weight)


class Counter:
    """A metric that is updated batch by batch."""

    def update(self, *args: Any) -> None: ...
    def compute(self) -> float:
        return 0.0

    def reset(self) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"generation_config": {"max_new_tokens": 3}},
            "generation_config has no effect without predict_with_generate=True",
        ),
        (
            {"predict_with_generate": True, "metrics": {"c": Counter()}},
            r"metrics\['c'\] is a Counter, which is updated in training",
        ),
        ({"predict_with_generate": True, "generation_config": {"max_words": 3}}, "generation_config has no max_words"),
        (
            {"predict_with_generate": True, "generation_config": {"num_return_sequences": 2, "do_sample": True}},
            "num_return_sequences=2 of the generation_config makes 2 texts of a sample",
        ),
        ({"predict_with_generate": True, "generation_config": 3}, "generation_config is a int: pass a dict"),
    ],
)
def test_what_cannot_generate_is_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(gpt(), device="cpu", batch_size=4, **arguments).fit(ROWS, ROWS)


class Writer(torch.nn.Module):
    """A model that is not of transformers and has no config."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.nn.Embedding(11, 11)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        scores = self.scores(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}

    def generate(self, input_ids: Any, generation_config: Any, **others: Any) -> Any:
        more = torch.full((len(input_ids), generation_config.max_new_tokens), 5)
        return torch.cat([input_ids, more], dim=1)


class Narrow(Writer):
    def generate(self, input_ids: Any) -> Any:  # type: ignore[override]
        return input_ids


def test_a_model_with_a_generate_of_its_own_needs_no_config() -> None:
    settings = {"predict_with_generate": True, "generation_config": {"max_new_tokens": 2}, "batch_size": 4}
    seen: list[Any] = []
    metrics = {"kept": lambda ids, labels: float(seen.append(ids.tolist()) or 0)}
    Trainer(Writer(), device="cpu", verbose=False, metrics=metrics, **settings).fit(ROWS, ROWS)
    assert seen == [[[5, 5]] * 10]
    with pytest.raises(ConfigError, match=r"generate\(\) of a Narrow does not take generation_config and synced_gpus"):
        Trainer(Narrow(), device="cpu", **settings).fit(ROWS, ROWS)


def test_a_model_without_generate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs a model with generate\(\), but Linear has none"):
        Trainer(torch.nn.Linear(2, 2), device="cpu", predict_with_generate=True).fit(
            torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 2))
        )
