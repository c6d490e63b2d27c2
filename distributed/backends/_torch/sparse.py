"""Average the sparse gradients of modules with `sparse=True` over all ranks, outside of torch's DDP.

Workaround (torch 2.13, no upstream issue known; may go when DDP exchanges sparse and dense gradients correctly): DDP
exchanges sparse gradients in addition to its buckets, and on gloo the messages of both are mixed up. The gradients of
layers below a sparse embedding are then wrong, without an error (seen with torch alone on two processes).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distributed.backends._torch.world import TorchWorld


def average(parameters: Sequence[torch.nn.Parameter], world: TorchWorld) -> None:
    """Replace each of the gradients of `parameters` by its mean over all ranks. A collective.

    A rank without a gradient contributes zero. If no rank has a gradient, none is set.
    """
    device = parameters[0].device
    own = [p.grad.coalesce() if p.grad is not None else _nothing(p) for p in parameters]
    sizes = torch.tensor([grad._nnz() for grad in own] + [p.grad is not None for p in parameters], device=device)
    all_sizes = torch.stack(world.gather_tensors(sizes)).tolist()
    for i, (parameter, grad) in enumerate(zip(parameters, own, strict=True)):
        lengths = [sizes[i] for sizes in all_sizes]
        if any(sizes[len(own) + i] for sizes in all_sizes):
            indices = _gathered(grad.indices().t(), lengths, world)
            values = _gathered(grad.values(), lengths, world) / len(lengths)
            parameter.grad = sparse_tensor(indices.t(), values, parameter.shape).coalesce()


def _nothing(parameter: torch.nn.Parameter) -> torch.Tensor:
    shape, device = parameter.shape, parameter.device
    indices = torch.empty(1, 0, dtype=torch.int64, device=device)
    values = torch.empty(0, *shape[1:], dtype=parameter.dtype, device=device)
    return sparse_tensor(indices, values, shape).coalesce()


def sparse_tensor(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return an uncoalesced sparse tensor.

    Workaround (torch 2.13, pytorch/pytorch#170626; may go when torch checks no invariants by default without a warning): without
    `check_invariants` it warns.
    """
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


def _gathered(rows: torch.Tensor, lengths: Sequence[int], world: TorchWorld) -> torch.Tensor:
    """Return the rows of all ranks, concatenated. `lengths` are the numbers of rows of the ranks."""
    padded = rows.new_zeros(max(*lengths, 1), *rows.shape[1:])
    padded[: len(rows)] = rows
    return torch.cat([part[:length] for part, length in zip(world.gather_tensors(padded), lengths, strict=True)])
