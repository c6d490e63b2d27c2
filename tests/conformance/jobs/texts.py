"""Train a tiny T5 on rows of a Hugging Face data set, generate in validation, and save it with its tokenizer.

Usage: texts.py OUT BACKEND. Writes OUT/seen.json on the main process: what the metric got, the metrics, and the texts
that SampleText logged.
"""

import json
import sys
from pathlib import Path

import datasets
import tokenizers
import torch
import transformers

from distributed import Trainer
from distributed.callbacks import SampleText

OUT, BACKEND = Path(sys.argv[1]), sys.argv[2]
WORDS = ["[PAD]", "[END]", "[UNK]", *"abcdefghijklm"]
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def tokenizer_of_words():
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="[END]", unk_token="[UNK]"
    )


def rows(tokenizer, count):
    texts = [" ".join(WORDS[3 + (i * k) % 13] for k in range(1, 2 + i % 4)) for i in range(count)]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    return datasets.Dataset.from_dict({"text": texts, "input_ids": ids, "labels": [[*each[::-1], 1] for each in ids]})


def t5():
    torch.manual_seed(5)
    config = transformers.T5Config(
        vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0, pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0, initializer_factor=3.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


seen = []


def exact(ids, labels):
    """Return the fraction of texts without a wrong id, and keep what came."""
    seen.append({"ids": ids.tolist(), "labels": labels.tolist()})
    return sum(
        float(own[1 : 1 + len(other)] == other) for own, other in zip(ids.tolist(), labels.tolist(), strict=True)
    ) / len(ids)


def main():
    tokenizer = tokenizer_of_words()
    trainer = Trainer(
        t5(), tokenizer=tokenizer, collate_fn=transformers.DataCollatorForSeq2Seq(tokenizer), metrics={"exact": exact},
        # Half of the words end a text, so that texts end at different lengths.
        predict_with_generate=True, generation_config={"max_new_tokens": 7, "eos_token_id": [1, *range(3, 16, 2)]},
        learning_rate=1e-3, epochs=2, global_batch_size=8, backend=BACKEND,
        callbacks=[SampleText(["a b c", "d"], tokenizer=tokenizer, every_n_steps=2, name="told", max_new_tokens=5)],
    )  # fmt: skip
    validation = rows(tokenizer, 11)
    history = trainer.fit(rows(tokenizer, 22), validation)
    trainer.save_pretrained(OUT / "saved")
    evaluated = trainer.evaluate(validation)
    if trainer.is_main_process:
        row = {name: value for name, value in history.rows[-1].items() if name in ("loss", "val_loss", "val_exact")}
        run_dir = Path(history.run_dir)
        logged = [json.loads(line) for line in (run_dir / "media.jsonl").read_text().splitlines()]
        told = {each["step"]: (run_dir / each["path"]).read_text() for each in logged if each["name"] == "told"}
        (OUT / "seen.json").write_text(json.dumps({"seen": seen, "row": row, "evaluated": evaluated, "told": told}))


main()
