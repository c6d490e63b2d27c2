"""Every "yes" of the capability table has a test of its effect on that backend.

A setting that the adapters read is tested on every adapter. A setting that only the code above them reads works the same on all
adapters, so one test is enough, which test_options.py names.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import distributed
from distributed.backends.capabilities import capabilities_of, settings_for_all
from distributed.config.fields import rules
from distributed.config.registry import REGISTRY
from distributed.config.settings import DistributedConfig
from distributed.testing.conformance import checks_for
from tests.conformance.test_every_backend import ADAPTERS, MORE_ADAPTERS
from tests.conformance.test_options import TESTED

HERE = Path(__file__).parent
ADAPTER_FILES = sorted((Path(distributed.__file__).parent / "backends").rglob("*.py"))

# Setting -> the check of the shipped suite that fails if an adapter ignores the setting.
OF_SUITE = {
    "dtype": "same numbers: adamw",
    "seed": "same numbers: in-order",
    "shuffle": "same numbers: in-order",
    "learning_rate": "same numbers: adamw",
    "lr_scaling": "scaled rate",
    "optimizer": "same numbers: named",
    "scheduler": "same numbers: named",
    "warmup_steps": "same numbers: sgd-schedule-clip-warmup",
    "scheduler_interval": "same numbers: epoch-schedule",
    "gradient_clipping": "clipping",
    "mixed_precision": "bf16",
    "scaler_init_scale": "fp16",
    "scaler_growth_interval": "fp16",
    "activation_checkpointing": "recomputed",
    "compile": "compiled",
    "deterministic": "deterministic",
    "nan_policy": "nan is left out everywhere",
}
# Adapters read these for an error, a default or the rendezvous. TESTED names the tests of these settings.
OF_ALL = {
    "backend", "address", "communication_backend", "timeout_s", "start_timeout", "hang_timeout", "epochs", "max_steps", "monitor",
    "checkpoint_trainable_only", "init_from", "data.presharded", "data.remove_unused_columns", "profile",
    "num_nodes", "min_nodes", "master_addr", "nproc_per_node", "min_nproc_per_node", "num_gpus", "gpus_per_node", "device", "wait",
}  # fmt: skip


def read_by_adapters():
    text = "\n".join(path.read_text() for path in ADAPTER_FILES)
    return {name for name in settings_for_all() if re.search(rf'config\.{name}\b|is_given\("{name}"\)', text)}


def test_what_the_adapters_read_is_listed():
    # Backend.mixed_precision, config.options("data"), distributed.config.optimization
    by_another_name = {"mixed_precision", "data.presharded", "data.remove_unused_columns", "scheduler"}
    assert read_by_adapters() | by_another_name == set(OF_SUITE) | OF_ALL


def has_effect(found, name):
    """Return whether the backend accepts a value of the setting other than the default."""
    rule = rules(DistributedConfig).get(name)
    others = [] if rule is None else [each for each in rule.choices or () if each != rule.default]
    return found.accepts(name) and (not others or any(found.accepts(f"{name}={each}") for each in others))


@pytest.mark.parametrize("backend", REGISTRY)
def test_every_setting_that_works_has_a_test_there(backend):
    found = capabilities_of(REGISTRY[backend])
    works = [name for name in settings_for_all() if has_effect(found, name)]
    assert len(works) > len(DistributedConfig.__dataclass_fields__) / 2
    adapters = [adapter for adapter in [*ADAPTERS, *MORE_ADAPTERS] if adapter.backend == backend]
    for name in works:
        checked = [OF_SUITE[name] in checks_for(adapter) for adapter in adapters] if name in OF_SUITE else []
        assert all(checked) and (checked or name in TESTED), name
