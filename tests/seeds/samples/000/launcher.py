# 000, "Fault Tolerance and Recovery". Changed: import; 2 processes on 1 node, gloo.
from distributed import LaunchConfig, DistributedLauncher

# Configure fault tolerance
config = LaunchConfig(
    nproc_per_node=2,
    backend="gloo",
    nnodes=1,
    max_restarts=3,        # Restart failed processes
    monitor_interval=1.0,  # Monitor every second
    start_timeout=600      # 10 minute startup timeout
)

launcher = DistributedLauncher(config)
exit_code = launcher.launch("train.py", "--epochs", "100")
