"""Starts worker processes, watches them, and makes a process a worker. `distributed.launcher` is the way in."""
