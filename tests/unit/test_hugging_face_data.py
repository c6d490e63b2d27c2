"""Tokenizers, collate functions and the data sets of Hugging Face: what a batch of them holds, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import distributed
from distributed import Callback, Trainer, export
from distributed.backends._torch.collating import Batching
from distributed.errors import ConfigError
from distributed.state import Job
from tests.unit.ranks import on_ranks, plan, sharded

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
WORDS = ["[PAD]", "[UNK]", "red", "green", "blue", "very"]
TEXTS = ["red", "very green", "blue", "very very red", "green", "very blue", "red red", "blue"]


def tokenizer_of(**special: Any) -> Any:
    """A tokenizer of whole words that is made in memory."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", **special}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **named)


def rows(tokenizer: Any = None) -> Any:
    """Sentences with their ids, ragged, and a label each."""
    tokenizer = tokenizer or tokenizer_of()
    data = datasets.Dataset.from_dict({"text": TEXTS, "label": [i % 2 for i in range(len(TEXTS))]})
    return data.map(lambda row: {"input_ids": tokenizer(row["text"])["input_ids"]})


class Bag(torch.nn.Module):
    """Scores of the words of a row, for batches as models of transformers take them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Embedding(len(WORDS), 2, padding_idx=0)
        self.seen: list[dict[str, Any]] = []

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        self.seen.append({"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels})
        scores = self.weights(input_ids).sum(1)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


def batches(
    data: Any, *, world: int = 1, size: int = 4, model: Any = None, removes: bool = True, **job: Any
) -> list[Any]:
    """The micro-batches of an epoch, those of the ranks in turn."""

    def read(rank: int, reduce: Any) -> list[Any]:
        batching = Batching.of(Job(None, **job), removes_columns=removes)
        batching.columns.read(Bag() if model is None else model, lambda text: None)
        part = sharded(data, plan(world, size), rank, reduce, batching=batching, train=False)
        return [micro.batch for update in part.epoch(0) for micro in update.micro_batches]

    return [batch for group in zip(*on_ranks(world, read), strict=True) for batch in group]


def test_a_tokenizer_pads_rows_as_its_own_collator_does() -> None:
    for side in ("right", "left"):
        tokenizer = tokenizer_of(padding_side=side)
        made = batches(rows(tokenizer), processing_class=tokenizer)
        wanted = transformers.DataCollatorWithPadding(tokenizer)(
            [{"input_ids": tokenizer(text)["input_ids"], "label": i % 2} for i, text in enumerate(TEXTS[:4])]
        )
        assert made[0].keys() == set(wanted)
        assert all(torch.equal(made[0][name], wanted[name]) for name in wanted)
        assert len(made) == 2


def test_labels_of_tokens_are_padded_with_those_that_losses_ignore() -> None:
    tokenizer = tokenizer_of(padding_side="left")
    data = rows(tokenizer).remove_columns("label").map(lambda row: {"labels": row["input_ids"]})
    (batch,) = batches(data, size=8, processing_class=tokenizer)
    assert batch["labels"].shape == batch["input_ids"].shape == (8, 3)
    assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)


def test_rows_become_tensors_without_a_tokenizer_and_strings_stay_lists() -> None:
    data = datasets.Dataset.from_dict(
        {"pair": [[1, 2], [3, 4]], "rate": [0.5, 1.0], "yes": [True, False], "name": ["a", "b"], "cube": [[[1]], [[2]]]}
    )
    for each in (
        data,
        data.with_format("torch"),
        data.with_format("numpy"),
        Subset(data, [0, 1]),
        data.to_iterable_dataset(),
    ):
        (batch,) = batches(each, removes=False)
        assert batch["pair"].tolist() == [[1, 2], [3, 4]] and batch["pair"].dtype == torch.int64
        assert batch["rate"].tolist() == [0.5, 1.0] and batch["rate"].dtype == torch.float32
        assert batch["yes"].tolist() == [True, False] and list(batch["name"]) == ["a", "b"]
        assert batch["cube"].shape == (2, 1, 1)


def test_columns_that_the_model_does_not_take_are_dropped_and_said_once(capsys: Any) -> None:
    data, told = rows(), []

    class Told(Callback):
        def on_train_start(self, state: Any) -> None:
            told.append(self.context.processing_class)

    tokenizer, model = tokenizer_of(), Bag()
    trainer = Trainer(model, tokenizer=tokenizer, batch_size=4, device="cpu", callbacks=[Told()])
    trainer.fit(data, data)
    trainer.fit(data, data)
    out = capsys.readouterr().out
    assert out.count("columns that Bag.forward does not take are dropped: text (data.remove_unused_columns=false") == 1
    assert told == [tokenizer, tokenizer]
    assert all(each["labels"] is not None and each["attention_mask"] is not None for each in model.seen)

    kept = Trainer(Bag(), tokenizer=tokenizer, batch_size=4, device="cpu", data={"remove_unused_columns": False})
    with pytest.raises(
        ConfigError, match=r"the batch has 'text', but forward\(input_ids, attention_mask, labels\) of Bag does not"
    ):
        kept.fit(data)
    seen: list[Any] = []

    def step(model: Any, batch: Any) -> Any:
        seen.append(list(batch))
        return model(batch["input_ids"], labels=batch["labels"])["loss"]

    Trainer(Bag(), tokenizer=tokenizer, training_step=step, batch_size=4, device="cpu").fit(data)
    assert seen == [["text", "labels", "input_ids", "attention_mask"]] * 2


def test_a_collate_function_makes_the_batches_of_a_data_set_and_of_a_plain_loader() -> None:
    tokenizer = tokenizer_of()
    collators = [
        transformers.DataCollatorWithPadding(tokenizer),
        lambda rows: {"input_ids": torch.tensor([row["input_ids"][:1] for row in rows])},
    ]
    for collate in collators:
        for data in (rows(tokenizer), DataLoader(rows(tokenizer), batch_size=4)):
            made = batches(data, collate_fn=collate, processing_class=tokenizer)
            assert [batch["input_ids"].shape for batch in made] in ([(4, 3), (4, 2)], [(4, 1), (4, 1)])
    (pair,) = batches(TensorDataset(torch.arange(4.0)), collate_fn=lambda samples: len(samples))
    assert pair == 4


def test_targets_are_called_labels_unless_a_collate_function_reads_them() -> None:
    tokenizer, narrow = tokenizer_of(), datasets.Dataset.from_dict({"input_ids": [[2, 3]] * 4, "label": [0, 1, 0, 1]})
    both = narrow.map(lambda row: {"labels": 1 - row["label"]})
    for data, arguments in (
        (narrow, {}),
        (narrow, {"processing_class": tokenizer, "removes": False}),
        (narrow, {"processing_class": tokenizer, "loss_fn": torch.nn.functional.cross_entropy}),
        (both, {}),
        (both, {"processing_class": tokenizer}),
    ):
        (batch,) = batches(data, **arguments)
        assert "label" not in batch and batch["labels"].tolist() == ([0, 1, 0, 1] if data is narrow else [1, 0, 1, 0])
    (batch,) = batches(both, processing_class=tokenizer, removes=False)
    assert {"label", "labels"} < batch.keys()
    (batch,) = batches(narrow, collate_fn=lambda rows: {"labels": torch.tensor([row["label"] for row in rows])})
    assert batch["labels"].tolist() == [0, 1, 0, 1]


def test_a_loop_of_the_script_gets_all_columns_by_their_own_names() -> None:
    columns = {"x": [[0.0, 1.0]] * 4, "label": [0, 1, 0, 1], "weight": [1.0] * 4}
    data, seen, linear = datasets.Dataset.from_dict(columns), [], torch.nn.Linear(2, 2)
    with distributed.Session(epochs=1, batch_size=2, device="cpu", verbose=False) as s:
        model, _, loader = s.prepare(linear, None, data)
        for _ in s.epochs():
            for batch in loader:
                seen.append(set(batch))
                s.backward(torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"]))
                s.update()
    assert seen == [set(columns)] * 2


def test_batches_are_the_same_samples_at_any_number_of_processes() -> None:
    tokenizer = tokenizer_of()
    for data in (rows(tokenizer), rows(tokenizer).to_iterable_dataset()):
        (one,) = batches(data, size=8, processing_class=tokenizer)
        two = batches(data, world=2, size=4, processing_class=tokenizer)
        assert len(two) == 2
        joined = [None] * 8
        for rank, batch in enumerate(two):
            joined[rank::2] = [row[row > 0].tolist() for row in batch["input_ids"]]
        assert joined == [row[row > 0].tolist() for row in one["input_ids"]]


class Recorded(torch.nn.Linear):
    """A linear layer that remembers its inputs."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.seen: list[float] = []

    def forward(self, x: Any) -> Any:
        self.seen += x.flatten().tolist()
        return super().forward(x[:, None])


def test_a_resumed_run_continues_a_stream_within_its_epoch(tmp_path: Any) -> None:
    read: list[int] = []

    def row(each: Any) -> Any:
        read.append(int(each["x"]))
        return {"x": float(each["x"]), "y": float(each["x"])}

    def fit(**settings: Any) -> tuple[list[float], list[int], Any]:
        stream = datasets.Dataset.from_dict({"x": list(range(24))}).to_iterable_dataset(num_shards=3).map(row)
        torch.manual_seed(1)
        model = Recorded()
        loss = torch.nn.functional.mse_loss
        trainer = Trainer(
            model, training_step=lambda model, batch: loss(model(batch["x"])[:, 0], batch["y"]), batch_size=4, device="cpu",
            learning_rate=0.01, epochs=2, verbose=False, **settings,
        )  # fmt: skip
        read.clear()
        trainer.fit(stream)
        return model.seen, list(read), model.weight.detach().clone()

    whole, _, wanted = fit(checkpoint_dir=str(tmp_path / "whole"))
    first, _, _ = fit(checkpoint_dir=str(tmp_path / "cut"), max_steps=8)
    assert whole[: len(first)] == first and len(first) == 32
    (newest,) = (tmp_path / "cut").rglob("step-00000008")
    rest, used, weight = fit(checkpoint_dir=str(tmp_path / "more"), resume_from_checkpoint=str(newest))
    assert rest == whole[32:] and torch.equal(weight, wanted)
    assert used == [int(each) for each in rest]  # nothing is read twice


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"collate_fn": 3}, "collate_fn is a int: pass a function"),
        ({"tokenizer": "bert"}, "tokenizer is a str, which has no save_pretrained"),
        ({"processing_class": 1}, "processing_class is a int, which has no save_pretrained"),
        ({"tokenizer": tokenizer_of(), "processing_class": tokenizer_of()}, "are two names of one argument"),
    ],
)
def test_arguments_of_other_types_are_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(Bag(), device="cpu", **arguments)


def test_what_cannot_be_batched_is_refused_in_one_line_with_the_fix() -> None:
    data = rows()
    own = DataLoader(data, batch_size=4, collate_fn=lambda rows: rows)

    def mine(samples: Any) -> Any:
        return samples

    with pytest.raises(ConfigError, match=r"Trainer\(collate_fn=mine\) and the DataLoader's collate_fn=<lambda> both"):
        Trainer(Bag(), collate_fn=mine, device="cpu").fit(own)
    with pytest.raises(
        ConfigError, match=r"column 'input_ids' has sequences of 1 to 3 elements in one batch: pass tokenizer"
    ):
        batches(data)
    unpadded = tokenizer_of(pad_token=None)
    with pytest.raises(ConfigError, match=r"no pad token: set tokenizer.pad_token"):
        batches(data, processing_class=unpadded)


def test_a_tokenizer_is_saved_beside_the_model(tmp_path: Any) -> None:
    tokenizer = tokenizer_of()
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.BertForSequenceClassification(config)
    trainer = Trainer(model, tokenizer=tokenizer, batch_size=4, device="cpu")
    trainer.fit(rows(tokenizer))
    assert trainer.save_pretrained(tmp_path / "saved") == tmp_path / "saved"
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again(TEXTS[1])["input_ids"] == tokenizer(TEXTS[1])["input_ids"]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(own, model.state_dict()[name]) for name, own in loaded.state_dict().items())
    inputs = dict(tokenizer(TEXTS[1:2], return_tensors="pt"))
    for force in (False, True):  # a directory with the files of a tokenizer may be replaced
        path = tmp_path / "exported"
        export(model, None, path, format="huggingface", example=inputs, processing_class=tokenizer, force=force)
        assert (
            transformers.AutoTokenizer.from_pretrained(path)(TEXTS[1])["input_ids"] == inputs["input_ids"][0].tolist()
        )
    with pytest.raises(ConfigError, match=r"a Bag has no save_pretrained\(\)"):
        Trainer(Bag(), device="cpu").save_pretrained(tmp_path / "other")
