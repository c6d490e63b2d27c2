# 004, "Mixed Precision Training". Changed: import; the CPU.
from torch import nn
from torch.cuda.amp import autocast, GradScaler

class MixedPrecisionTrainer:
    """Training with mixed precision (FP16)"""

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer
        self.scaler = GradScaler()  # Gradient scaler for FP16

    def train_epoch(self, train_loader):
        self.model.train()
        total_loss = 0

        for data, target in train_loader:
            data, target = data.cpu(), target.cpu()

            self.optimizer.zero_grad()

            # Forward pass with autocast
            with autocast():
                output = self.model(data)
                loss = nn.CrossEntropyLoss()(output, target)

            # Backward pass with scaled gradients
            self.scaler.scale(loss).backward()

            # Unscale gradients and update weights
            self.scaler.step(self.optimizer)
            self.scaler.update()

            total_loss += loss.item()

        return total_loss / len(train_loader)

# Usage
trainer = MixedPrecisionTrainer(model=model, optimizer=optimizer)
loss = trainer.train_epoch(train_loader)
