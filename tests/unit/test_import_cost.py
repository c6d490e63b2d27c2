"""What an import costs, as differences and ratios of the fastest of several runs in one go."""

from __future__ import annotations

import subprocess
import sys
import time


def fastest(code: str, runs: int) -> float:
    """Seconds of the quickest of `runs` interpreters."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        times.append(time.perf_counter() - started)
    return min(times)


def test_the_package_costs_under_30_ms_and_the_config_a_fifth_of_torch():
    bare = fastest("pass", 8)
    package = fastest("import distributed", 8) - bare
    config = fastest("import distributed; distributed.DistributedConfig(batch_size=8)", 8) - bare
    torch = fastest("import torch", 3) - bare
    assert package <= 0.030, f"{package * 1000:.0f} ms"
    assert config <= 0.2 * torch, f"{config / torch:.2f} of import torch"
