# 003, "Performance Debugging". Corrected (1 line): prof.step() for each batch, without which the schedule stays in its first wait.
# Profile distributed training
import torch.profiler

with torch.profiler.profile(
    activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA],
    schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
    on_trace_ready=torch.profiler.tensorboard_trace_handler("./distributed_profiler"),
    record_shapes=True,
    with_stack=True
) as prof:
    for batch in dataloader:
        output = model(batch)
        prof.step()
