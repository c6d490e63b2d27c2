"""Train with DeepSpeed alone, without a Trainer. Rank 0 prints the results."""

import json
import os
import sys

import deepspeed
import torch
import torch.distributed as dist


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 2)
    engine, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.05),
        training_data=[(torch.full((6,), i / 8 - 1), int(i > 7)) for i in range(16)],
        config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}},
    )
    losses = []
    for _ in range(20):
        for inputs, targets in loader:
            loss = torch.nn.functional.cross_entropy(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        seen = {"ranks": total.item(), "argv": sys.argv[1:], "first": losses[0], "last": losses[-1]}
        print(json.dumps({**seen, "device": engine.device.type, "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"]}))
    engine.destroy()
    dist.destroy_process_group()


main()
