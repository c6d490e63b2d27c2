# 002, "Horovod". Changed: epochs.
from distributed import HorovodTrainer
import horovod.torch as hvd

# Initialize Horovod
hvd.init()

# Create trainer
trainer = HorovodTrainer(
    model=model,
    optimizer=optimizer,
    loss_fn=loss_fn,
    verbose=(hvd.rank() == 0)  # Only rank 0 prints
)

# Train
trainer.fit(train_loader, epochs=3)

# Average metrics across all workers
avg_accuracy = trainer.metric_average(accuracy, name="accuracy")
