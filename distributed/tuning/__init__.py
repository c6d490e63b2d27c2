"""Sweeps over hyperparameters in many trials: spaces, proposals, schedulers, results; finders of one value belong in `finders`."""
