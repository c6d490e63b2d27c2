# 002, "PyTorch DDP". Changed: 2 processes on CPUs instead of 8 GPUs, layers, batch, epochs, rate.
from distributed import PyTorchDDPTrainer
import torch
import torch.nn as nn

class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 10)
        )

    def forward(self, x):
        return self.layers(x)

# Create trainer
trainer = PyTorchDDPTrainer(
    model=MyModel(),
    nproc_per_node=2,
    batch_size=32,  # Per GPU
    epochs=4,
    learning_rate=0.01,
    mixed_precision=True  # FP16 for speed
)

# Train
history = trainer.fit(
    train_loader,
    val_loader,
    checkpoint_dir="./checkpoints",
    mlflow_experiment="distributed-training"
)

print(f"Training time: {history.total_time:.2f}s")
print(f"Final accuracy: {history.best_accuracy:.4f}")
