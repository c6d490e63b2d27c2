"""The directory of a run: its journal of events, summary, result and history, and files and processes around it. Checkpoints belong to `checkpoints`."""
