"""Searches of a learning rate and of a batch size, each by short fits. Searches of hyperparameters belong to `tuning`."""
