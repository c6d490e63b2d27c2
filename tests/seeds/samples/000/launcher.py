# 000, "Fault Tolerance and Recovery". Changed: import; 2 processes on each of 2 nodes, gloo.
from distributed import LaunchConfig, DistributedLauncher

# Configure fault tolerance
config = LaunchConfig(
    nproc_per_node=2,
    backend="gloo",
    nnodes=2,
    max_restarts=3,        # Restart failed processes
    monitor_interval=1.0,  # Monitor every second
    start_timeout=600      # 10 minute startup timeout
)

launcher = DistributedLauncher(config)
exit_code = launcher.launch("train.py", "--epochs", "100")
