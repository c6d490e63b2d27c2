"""The files of a checkpoint: their format, their digests, and writing them so that nothing is half there. Tensors come from `backends`."""
