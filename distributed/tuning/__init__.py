"""Searches for hyperparameters over many trials: spaces, proposals, schedulers, results; searches for one value belong in `finders`."""
