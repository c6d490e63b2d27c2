"""What cannot be cut is said by name before anything is cut."""

from __future__ import annotations

import pytest
import torch

from distributed.backends._torch.fully_sharded import check_parameters
from distributed.errors import ConfigError


def model(parameter: torch.Tensor) -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(2, 3))
    made.temperature = torch.nn.Parameter(parameter)
    return made


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        (torch.tensor(1.0), "temperature is a single number without a dimension, which fully_shard cannot cut"),
        (torch.ones(2, 3).t(), "temperature is not contiguous in memory, so fully_shard cannot cut it"),
    ],
)
def test_a_parameter_that_cannot_be_cut_is_named(parameter, said):
    with pytest.raises(ConfigError, match=said):
        check_parameters(model(parameter))


def test_others_pass():
    check_parameters(model(torch.ones(1)))
