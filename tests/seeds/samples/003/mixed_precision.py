# 003, "Mixed Precision Training". Changed: import.
import torch

# Enable automatic mixed precision
scaler = torch.cuda.amp.GradScaler()

for batch in dataloader:
    optimizer.zero_grad()

    with torch.cuda.amp.autocast():
        output = model(batch)
        loss = criterion(output, targets)

    scaler.scale(loss).backward()

    if args.gradient_clip_norm > 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.gradient_clip_norm)

    scaler.step(optimizer)
    scaler.update()
