"""One script on every backend, and how far its numbers are from those of one process. Tests of adapters belong to `testing`."""
