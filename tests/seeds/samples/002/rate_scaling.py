# 002, "Learning Rate Scaling". Changed: import; 2 processes on CPUs instead of 8 GPUs.
from distributed import PyTorchDDPTrainer

# Rule of thumb: lr_new = lr_base × sqrt(batch_size_new / batch_size_base)

base_lr = 0.001
base_batch = 32
num_gpus = 2

new_batch = base_batch * num_gpus
new_lr = base_lr * (new_batch / base_batch) ** 0.5

trainer = PyTorchDDPTrainer(
    model=model,
    nproc_per_node=num_gpus,
    learning_rate=new_lr
)
