"""Finders of a learning rate or a batch size, each by short fits; sweeps over hyperparameters belong in `tuning`."""
