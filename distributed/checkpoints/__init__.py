"""Files of a checkpoint: format, digests, crash-safe writing, agreement between ranks; an engine's tensors belong in `backends`."""
