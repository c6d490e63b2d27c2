"""Models that ZeRO cannot partition are refused before training."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from distributed.backends._deepspeed.engine import check  # noqa: E402
from distributed.errors import ConfigError  # noqa: E402


@pytest.mark.parametrize(("stage", "is_trained", "is_refused"), [(1, True, True), (2, False, False), (3, False, True)])
def test_a_parameter_without_elements(stage: int, is_trained: bool, is_refused: bool) -> None:
    model = torch.nn.Linear(3, 2)
    model.register_parameter("empty", torch.nn.Parameter(torch.empty(0, 4), requires_grad=is_trained))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_refused:
        with pytest.raises(
            ConfigError, match=r"^empty has no elements, and DeepSpeed cannot cut it: remove it, or use"
        ):
            check(model, optimizer, stage, allows_any=False)
    else:
        check(model, optimizer, stage, allows_any=False)
