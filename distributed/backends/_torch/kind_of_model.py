"""Choose the kind of a model."""

from __future__ import annotations

import torch

from distributed.backends._torch import tensors
from distributed.backends._torch.kinds import TorchKind
from distributed.backends._torch.several_models import SeveralModels
from distributed.state import WorkerContext


def kind_of(module: torch.nn.Module, context: WorkerContext = tensors.ALONE) -> TorchKind:
    """Return the kind of the module that `modules.build_model` returned."""
    from distributed.backends._torch.keras_module import KerasModule

    if isinstance(module, KerasModule):
        from distributed.backends._torch.keras_kind import KerasKind

        return KerasKind(module, context)
    if isinstance(module, SeveralModels):
        from distributed.backends._torch.several_kind import SeveralKind

        return SeveralKind(module, context)
    return TorchKind(module, context)
