# 001, "Process Launcher". Changed: import; 2 processes, gloo.
from distributed import LaunchConfig, DistributedLauncher

# Configure basic launcher
config = LaunchConfig(
    nproc_per_node=2,      # Number of processes
    backend="gloo",
    nnodes=1,              # Single node recommended
    max_restarts=0,        # Restart feature not implemented
    monitor_interval=1.0,  # Basic monitoring only
    start_timeout=600      # Startup timeout
)

launcher = DistributedLauncher(config)
exit_code = launcher.launch("train.py", "--epochs", "100")
