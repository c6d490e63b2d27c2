"""Run one script on every backend and compare its numbers with those of one process. Tests of adapters belong to `testing`."""
