"""What a run leaves open to others and cannot close, as the warnings that are shown when it starts."""

from __future__ import annotations

from distributed.config.plan import ProcessPlan
from distributed.config.registry import row_in_use
from distributed.config.settings import DistributedConfig
from distributed.launching.secret import VARIABLE, shared_secret


def warnings_of(config: DistributedConfig, plan: ProcessPlan) -> list[str]:
    """Return one warning for each kind of port that others can reach. Raises ConfigError for a secret that can be guessed."""
    found = []
    listens = row_in_use(config, plan.backend).listens
    if listens and plan.world_size > 1:
        found.append(f"warning: {listens}: run where only people you trust can reach this machine (docs/security.md)")
    if plan.num_nodes > 1 and shared_secret() is None:
        found.append(
            f"warning: the nodes meet at {config.master_addr}:{config.master_port} without a secret: whoever reaches that port"
            f" can disturb the run, but not run code in it; set the same {VARIABLE}, or --token-file, on all nodes"
        )
    return found
