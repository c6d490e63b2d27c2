"""Ways to start a run, each checked before any process starts; what then starts and watches the processes belongs in `launching`.

`python -m distributed.launcher SCRIPT` and `launch_distributed_training` start scripts that need not use `Trainer`.
"""

from distributed.launcher.scripts import DistributedLauncher, LaunchConfig, launch_distributed_training

__all__ = ["DistributedLauncher", "LaunchConfig", "launch_distributed_training"]
