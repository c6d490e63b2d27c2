"""Run one script on every backend and compare its numbers with those of one process; tests of adapters belong in `testing`."""
