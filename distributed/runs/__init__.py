"""The directory of a run: journal of events, summary, result, history, and its processes; checkpoints belong in `checkpoints`."""
