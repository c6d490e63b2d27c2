# 002, "Ray Train". Changed: 2 trials of small sizes on CPUs. Corrected (2 lines): tune.run is told the metric, without which it has no best_config.
from distributed import RayTrainer
from ray import tune

# Define training function
def train_fn(config):
    model = create_model(config["hidden_size"])
    trainer = RayTrainer(model, config)
    trainer.fit(train_loader, val_loader)
    return {"accuracy": trainer.best_accuracy}

# Distributed hyperparameter search
analysis = tune.run(
    train_fn,
    config={
        "hidden_size": tune.choice([8, 16, 32]),
        "lr": tune.loguniform(1e-4, 1e-2),
        "batch_size": tune.choice([32, 64, 128])
    },
    num_samples=2,
    resources_per_trial={"cpu": 1},
    metric="accuracy",
    mode="max"
)

print(f"Best config: {analysis.best_config}")
