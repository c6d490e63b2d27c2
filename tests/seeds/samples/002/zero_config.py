# 002, "ZeRO Optimization". Changed: import. Corrected (7 lines): DeepSpeedConfig takes a dict, which also says the batch.
from deepspeed import DeepSpeedConfig

from distributed import PyTorchDDPTrainer

config = DeepSpeedConfig({
    "train_batch_size": 32,
    "zero_optimization": {
        "stage": 3,  # Partition optimizer states, gradients, and parameters
        "offload_optimizer": {
            "device": "cpu"  # Offload to CPU RAM
        },
        "offload_param": {
            "device": "cpu"
        }
    }
})

trainer = PyTorchDDPTrainer(
    model=model,
    deepspeed_config=config
)

# Can now train models with 100B+ parameters
