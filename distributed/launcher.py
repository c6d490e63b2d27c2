"""Start the workers of a script from Python, and as `python -m distributed.launcher SCRIPT`. The work is done in `launching`."""

from __future__ import annotations

import sys

from distributed.launching.scripts import DistributedLauncher, LaunchConfig, launch_distributed_training, main

__all__ = ["DistributedLauncher", "LaunchConfig", "launch_distributed_training"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
