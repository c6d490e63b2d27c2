"""What an import costs, as differences and ratios of the fastest of several runs in one go."""

from __future__ import annotations

import resource
import subprocess
import sys


def fastest(code: str, runs: int) -> float:
    """CPU seconds of the quickest of `runs` interpreters: an import waits for nothing, but other work may hold it up."""
    times = []
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(times)


def test_the_package_costs_a_fiftieth_of_torch_and_the_config_a_fifth():
    """A fiftieth is 30 ms where torch takes 1.5 s. Slower machines, and other processes, change both."""
    bare = fastest("pass", 8)
    package = fastest("import distributed", 8) - bare
    config = fastest("import distributed; distributed.DistributedConfig(batch_size=8)", 8) - bare
    torch = fastest("import torch", 3) - bare
    assert package <= 0.02 * torch, f"{package / torch:.3f} of import torch"
    assert config <= 0.2 * torch, f"{config / torch:.2f} of import torch"


def test_what_starts_a_run_loads_no_library_for_a_question_that_it_does_not_ask():
    """Looking up versions takes 25 ms to import, and only a run on several nodes compares versions."""
    code = (
        "import sys, distributed.cli.train, distributed.launcher.start; sys.exit('importlib.metadata' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
