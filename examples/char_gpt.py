"""Train a small GPT to predict the next character of the Python language reference, a text that every CPython contains.

python examples/char_gpt.py
python -m distributed.cli train --script examples/char_gpt.py --nproc-per-node 2 -- --hidden-size 128 --layers 3
"""

import argparse
import hashlib
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from distributed import Trainer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Vocabulary:
    """The most frequent characters of a text, `size` at most. Token 0 stands for all other characters."""

    def __init__(self, text: str, size: int) -> None:
        common = [character for character, _ in Counter(text).most_common(size - 1)]
        self.characters = [UNKNOWN, *sorted(common)]
        self.tokens = {character: token for token, character in enumerate(self.characters)}

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor([self.tokens.get(character, 0) for character in text])

    def decode(self, tokens: torch.Tensor) -> str:
        return "".join(self.characters[token] for token in tokens.tolist())


class Windows(Dataset):
    """The text in pieces of `length` characters. The target of each character is the next one."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.tokens[index * self.length : (index + 1) * self.length + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Causal self-attention, then a two-layer net, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Map tokens [batch, length] to scores of each next token [batch, length, vocabulary]."""

    def __init__(self, vocab_size: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.token, self.position = nn.Embedding(vocab_size, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size)
        for weight in (self.token.weight, self.position.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def sample(self, tokens: torch.Tensor, count: int, temperature: float = 0.7) -> torch.Tensor:
        """Return `tokens` [length] followed by `count` more tokens, drawn one by one."""
        generator = torch.Generator().manual_seed(0)
        for _ in range(count):
            seen = tokens[None, -self.length :].to(self.head.weight.device)
            scores = self(seen)[0, -1].cpu() / temperature
            tokens = torch.cat([tokens, torch.multinomial(scores.softmax(-1), 1, generator=generator)])
        return tokens


def next_token_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=256, help="characters kept at most (default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=128, help="width of the model (default: %(default)s)")
    parser.add_argument("--attention-heads", type=int, default=4, help="divides the width (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=3, help="blocks (default: %(default)s)")
    parser.add_argument(
        "--max-seq-length", type=int, default=128, help="characters seen at once (default: %(default)s)"
    )
    parser.add_argument("--use-gradient-checkpointing", action="store_true", help="recompute activations, save memory")
    parser.add_argument("--sample-length", type=int, default=300, help="characters of text at the end")
    args = parser.parse_args()
    if args.hidden_size % args.attention_heads:
        parser.error(f"--hidden-size {args.hidden_size} is not a multiple of --attention-heads {args.attention_heads}")
    if args.vocab_size < 2:
        parser.error(f"--vocab-size {args.vocab_size} leaves no character: give 2 or more")
    return args


def main() -> None:
    args = arguments()
    text = "\n".join(topics[name] for name in sorted(topics))
    digest = hashlib.sha256(text.encode()).hexdigest()  # the text differs between Python versions
    vocabulary = Vocabulary(text, args.vocab_size)
    tokens = vocabulary.encode(text)
    split = int(len(tokens) * 0.95)
    model = GPT(len(vocabulary.characters), args.hidden_size, args.attention_heads, args.layers, args.max_seq_length)
    trainer = Trainer(
        model,
        {"text_sha256": digest, "text_characters": len(text)},  # recorded in the run's config.yaml
        loss_fn=next_token_loss,
        epochs=5,
        batch_size=16,
        learning_rate=3e-3,
        warmup_steps=20,
        gradient_clipping=1.0,
        activation_checkpointing=args.use_gradient_checkpointing,
    )
    train, held_out = (Windows(part, args.max_seq_length) for part in (tokens[:split], tokens[split:]))
    trainer.fit(train, held_out)
    loss = trainer.evaluate(held_out)["loss"]
    if trainer.is_main_process:
        sample = model.eval().sample(vocabulary.encode("The "), args.sample_length)
        print(f"text          {len(text)} characters, {len(vocabulary.characters)} tokens, sha256 {digest}")
        print(f"held-out loss {loss:.4f} nats per character")
        print(f"sample        {vocabulary.decode(sample)}")


if __name__ == "__main__":
    main()
