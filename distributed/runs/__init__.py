"""The directory of a run, its journal of events, its summary and its result. How events are shown belongs to `loggers`, checkpoints belong to `checkpoints`."""
