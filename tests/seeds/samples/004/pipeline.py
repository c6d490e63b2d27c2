# 004, "Pipeline Parallelism". Changed: imports; the CPU.
import torch.nn as nn

class PipelineParallel(nn.Module):
    """Simple pipeline parallelism"""

    def __init__(self, model_layers, num_gpus):
        super().__init__()
        self.num_gpus = num_gpus

        # Split layers across GPUs
        layers_per_gpu = len(model_layers) // num_gpus
        self.partitions = []

        for gpu_idx in range(num_gpus):
            start_idx = gpu_idx * layers_per_gpu
            end_idx = start_idx + layers_per_gpu if gpu_idx < num_gpus - 1 else len(model_layers)

            partition = nn.Sequential(*model_layers[start_idx:end_idx])
            partition = partition.to('cpu')
            self.partitions.append(partition)

    def forward(self, x):
        # Sequential execution across GPUs
        for gpu_idx, partition in enumerate(self.partitions):
            x = x.to('cpu')
            x = partition(x)

        return x

# Usage
layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)]
model = PipelineParallel(layers, num_gpus=2)

# Forward pass moves data across GPUs
output = model(input_data)
