"""Searches for a learning rate or a batch size, each by short fits; searches for hyperparameters belong in `tuning`."""
