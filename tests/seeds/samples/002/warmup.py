# 002, "Warmup for Large Batch Training". Changed: import; epochs.
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

warmup_epochs = 2
total_epochs = 5

warmup = LinearLR(optimizer, start_factor=0.1, total_iters=warmup_epochs)
main = CosineAnnealingLR(optimizer, T_max=total_epochs - warmup_epochs)

scheduler = SequentialLR(
    optimizer,
    schedulers=[warmup, main],
    milestones=[warmup_epochs]
)
