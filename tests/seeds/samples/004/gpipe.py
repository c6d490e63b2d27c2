# 004, "GPipe". Changed: imports.
import torch
import torch.nn as nn

class GPipe(nn.Module):
    """GPipe with micro-batching"""

    def __init__(self, model, num_gpus, chunks=4):
        super().__init__()
        self.model = model
        self.num_gpus = num_gpus
        self.chunks = chunks

    def forward(self, x):
        # Split batch into micro-batches
        micro_batches = x.chunk(self.chunks, dim=0)

        outputs = []
        for micro_batch in micro_batches:
            # Forward pass through pipeline
            output = self.model(micro_batch)
            outputs.append(output)

        # Concatenate results
        return torch.cat(outputs, dim=0)

# Training with GPipe
def train_gpipe(model, train_loader, optimizer):
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()

        # Forward pass (pipelined)
        output = model(data)
        loss = nn.CrossEntropyLoss()(output, target)

        # Backward pass (pipelined)
        loss.backward()
        optimizer.step()
