# 004, "Profiling and Bottleneck Analysis". Nothing is changed.
import torch.profiler as profiler

def profile_training():
    with profiler.profile(
        activities=[
            profiler.ProfilerActivity.CPU,
            profiler.ProfilerActivity.CUDA
        ],
        schedule=profiler.schedule(wait=1, warmup=1, active=3),
        on_trace_ready=profiler.tensorboard_trace_handler('./log'),
        with_stack=True
    ) as prof:
        for step, (data, target) in enumerate(train_loader):
            if step >= (1 + 1 + 3):
                break

            output = model(data)
            loss = criterion(output, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

            prof.step()

# Analyze with TensorBoard
# tensorboard --logdir=./log
