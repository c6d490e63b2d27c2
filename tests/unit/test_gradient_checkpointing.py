"""checkpoint_scope recomputes what it should, changes no bit and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

import distributed
from distributed import ConfigError, checkpoint_scope, gradient_checkpointing


class Block(torch.nn.Module):
    forwards = 0

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Dropout(0.5))

    def forward(self, x):
        Block.forwards += 1
        return x + self.inner(x)


@pytest.fixture
def model():
    torch.manual_seed(1)
    Block.forwards = 0
    return torch.nn.Sequential(Block(), Block(), torch.nn.Linear(6, 2))


def gradients(model, scope, backward_within=True):
    """Of one loss with dropout, and the blocks' forwards until then."""
    model.zero_grad()
    Block.forwards = 0
    torch.manual_seed(2)
    with scope:
        loss = torch.nn.MSELoss()(model(torch.ones(3, 6)), torch.zeros(3, 2))
        if backward_within:
            loss.backward()
    if not backward_within:
        loss.backward()
    return [p.grad.clone() for p in model.parameters()], Block.forwards


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("backward_within", [True, False])
def test_blocks_are_computed_twice_and_no_bit_changes(model, backward_within):
    kept, once = gradients(model, torch.enable_grad())
    recomputed, twice = gradients(model, gradient_checkpointing.checkpoint_scope(), backward_within)
    assert (once, twice) == (2, 4)
    assert same(kept, recomputed)


def test_nothing_is_left_after_the_scope_also_after_an_error(model):
    scope = checkpoint_scope()
    with pytest.raises(RuntimeError), scope:
        model(torch.ones(3, 5))
    assert all("forward" not in vars(module) for module in model.modules())
    assert gradients(model, torch.enable_grad())[1] == 2
    assert gradients(model, scope)[1] == 4  # and it can be entered again


def test_named_modules_are_recomputed_and_no_others(model):
    kept, _ = gradients(model, torch.enable_grad())
    recomputed, forwards = gradients(model, checkpoint_scope(model[1]))
    assert forwards == 3 and same(kept, recomputed)


def test_a_forward_without_gradients_is_not_touched(model):
    with checkpoint_scope(), torch.no_grad():
        model(torch.ones(3, 6))
    assert Block.forwards == 2


def test_a_hugging_face_model_uses_its_own_switch():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.arange(8)[None]

    def run(scope):
        model.zero_grad()
        torch.manual_seed(2)
        with scope:
            loss = model(tokens, labels=tokens, use_cache=False).loss
            is_on = model.transformer.h[0].gradient_checkpointing
            loss.backward()
        return [p.grad.clone() for p in model.parameters()], is_on, model.transformer.h[0].gradient_checkpointing

    kept, recomputed = run(torch.enable_grad()), run(checkpoint_scope())
    assert kept[1:] == (False, False) and recomputed[1:] == (True, False)
    assert same(kept[0], recomputed[0])


def test_what_cannot_be_recomputed_is_refused(model):
    with (
        checkpoint_scope(),
        pytest.raises(ConfigError, match=r"found no repeated block in Linear .*name what to recompute"),
    ):
        torch.nn.Linear(6, 2)(torch.ones(1, 6))
    with checkpoint_scope():
        torch.nn.Linear(2, 1)(model(torch.ones(1, 6)))  # a loss with parameters, after the model
    with pytest.raises(ConfigError, match="got a str: pass modules"):
        checkpoint_scope("layer1")


def test_a_memory_pool_is_refused_with_what_to_use_instead():
    with pytest.raises(ConfigError, match=r"torch's allocator keeps freed memory in a pool.*checkpoint_scope"):
        distributed.memory_pool_scope()
