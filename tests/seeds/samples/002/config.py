# 002, "Distributed Training Config". Nothing is changed.
from distributed import DistributedConfig

config = DistributedConfig(
    # Resources
    num_gpus=8,
    num_nodes=2,
    gpus_per_node=4,

    # Backend
    backend="pytorch-ddp",  # or "horovod", "ray", "tensorflow"

    # Training
    batch_size=32,  # Per GPU
    epochs=100,
    learning_rate=0.001,

    # Optimization
    mixed_precision=True,  # FP16
    gradient_accumulation_steps=4,
    gradient_clipping=1.0,

    # Communication
    communication_backend="nccl",  # or "gloo", "mpi"
    find_unused_parameters=False,

    # Checkpointing
    checkpoint_frequency=10,  # Every 10 epochs
    checkpoint_dir="./checkpoints",

    # Monitoring
    mlflow_tracking=True,
    tensorboard=True,
    log_every_n_steps=100
)
