"""Train a small GPT-2, made from a configuration of transformers, on the Python reference that every CPython contains.

python train.py
distributed train --script train.py --nproc-per-node 2
"""

import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from distributed import Trainer

LENGTH = 64  # tokens that the model sees at once


def encode(text: str) -> torch.Tensor:
    """Return the tokens of a text. Here a token is a byte; another model has a tokenizer of its own."""
    return torch.tensor(list(text.encode()))


class Pieces(Dataset):
    """A text in pieces of LENGTH tokens. The model itself shifts the labels by one token."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.pieces = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def net() -> GPT2LMHeadModel:
    """Return the model. To fine-tune trained weights instead, return GPT2LMHeadModel.from_pretrained(NAME)."""
    size = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # masks depend on the split of a batch
    model = GPT2LMHeadModel(GPT2Config(**size, **no_dropout, bos_token_id=0, eos_token_id=0))
    model.loss_type = "ForCausalLM"  # transformers 5 cannot tell it from the name of this class, and warns
    return model


if __name__ == "__main__":
    tokens = encode("\n".join(topics[name] for name in sorted(topics)))  # or your text: Path("text.txt").read_text()
    split = int(0.9 * len(tokens))
    held_out = Pieces(tokens[split:])
    trainer = Trainer(net, Path(__file__).with_name("config.yaml"))
    trainer.fit(Pieces(tokens[:split]), held_out)
    loss = trainer.evaluate(held_out)["loss"]
    if trainer.is_main_process:
        print(f"held-out loss {loss:.4f} per byte, perplexity {math.exp(loss):.2f}")
