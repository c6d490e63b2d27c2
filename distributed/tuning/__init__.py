"""Searches over many trials of one training: spaces, proposals, schedulers and results. Searches for a single value belong to `finders`."""
