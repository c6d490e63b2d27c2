# 004, "Gradient Accumulation". Changed: import; the CPU.
from torch import nn

class GradientAccumulationTrainer:
    """Training with gradient accumulation"""

    def __init__(self, model, optimizer, accumulation_steps=4):
        self.model = model
        self.optimizer = optimizer
        self.accumulation_steps = accumulation_steps

    def train_epoch(self, train_loader):
        self.model.train()
        total_loss = 0

        for batch_idx, (data, target) in enumerate(train_loader):
            data, target = data.cpu(), target.cpu()

            # Forward pass
            output = self.model(data)
            loss = nn.CrossEntropyLoss()(output, target)

            # Normalize loss (average over accumulation steps)
            loss = loss / self.accumulation_steps

            # Backward pass
            loss.backward()

            # Update weights every accumulation_steps
            if (batch_idx + 1) % self.accumulation_steps == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()

            total_loss += loss.item() * self.accumulation_steps

        return total_loss / len(train_loader)

# Usage
trainer = GradientAccumulationTrainer(
    model=model,
    optimizer=optimizer,
    accumulation_steps=4  # Effective batch size = 4 * actual batch size
)

loss = trainer.train_epoch(train_loader)
