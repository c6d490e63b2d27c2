# 002, "Hyperparameter Tuning at Scale". Changed: no GPUs, 2 trials.
from distributed import DistributedTuner

tuner = DistributedTuner(
    train_fn=train_function,
    search_space=search_space,
    num_gpus=0,  # Run 32 trials in parallel!
    trials_per_gpu=1
)

best_params = tuner.tune(num_samples=2)

# 100 trials in 3 hours instead of 100 hours!
