"""A model's graph is drawn without a trace in the model, whatever form its batches have."""

from __future__ import annotations

import sys

import torch
from torch import nn

from distributed.backends._torch import watching
from distributed.backends._torch.objective import Objective


class Counting(nn.Module):
    """Changes a buffer at each forward, and has a part that the user froze in eval mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.body[1].eval()

    def forward(self, x, scale=None):
        self.calls += 1
        return self.body(x if scale is None else x * scale)


def nodes(content):
    from tensorboard.compat.proto.graph_pb2 import GraphDef

    return [(node.name, node.op) for node in GraphDef.FromString(content).node]


def drawn(model, batch, **forms):
    objective = Objective(forms.get("loss_fn"), forms.get("training_step"), model, print)
    return nodes(watching.graph_of(model, objective, batch, 6))


def test_tracing_leaves_buffers_modes_and_gradients_as_they_were():
    model = Counting()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    had_tensorflow = "tensorflow" in sys.modules
    found = drawn(model, (torch.randn(6, 4), torch.randint(0, 3, (6,))), loss_fn=nn.functional.cross_entropy)

    assert [name for name, op in found if op == "aten::batch_norm" and "BatchNorm1d[1]" in name]
    assert any(op == "aten::cross_entropy_loss" for _, op in found)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == [True, True, True, False, True, True]
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert ("tensorflow" in sys.modules) is had_tensorflow


def test_batches_may_be_dicts_and_steps_the_users_own():
    batch = {"x": torch.randn(6, 4), "scale": torch.tensor(2.0), "labels": torch.randint(0, 3, (6,))}
    step = lambda model, batch: nn.functional.cross_entropy(model(batch["x"], batch["scale"]), batch["labels"])  # noqa: E731
    assert [op for _, op in drawn(Counting(), batch, training_step=step)].count("aten::linear") == 2


def test_values_are_of_what_this_rank_holds_in_a_type_that_numpy_has():
    model = nn.ModuleDict(
        {"wide": nn.Linear(2, 2), "rows": nn.Embedding(5, 2, sparse=True), "short": nn.Linear(2, 2).bfloat16()}
    )
    model["rows"](torch.tensor([1, 1, 3])).sum().backward()
    values = dict(watching.values_of(model))

    assert {str(array.dtype) for array in values.values()} == {"float32"}
    assert values["weights/short.weight"].size == 4 and "gradients/short.weight" not in values
    assert sorted(values["gradients/rows.weight"]) == [1, 1, 2, 2]  # the rows that were used
