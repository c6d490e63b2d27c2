"""The files of a checkpoint: format, digests, crash-safe writing and agreement between ranks. Tensors come from `backends`."""
