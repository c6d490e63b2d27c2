# 002, "Profiling". Changed: steps.
from torch.profiler import profile, ProfilerActivity

with profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
    record_shapes=True
) as prof:
    trainer.fit(train_loader, val_loader, max_steps=5)

# View bottlenecks
print(prof.key_averages().table(sort_by="cuda_time_total"))
