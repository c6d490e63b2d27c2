"""Starts worker processes, watches them, and makes a process a worker. What is checked before a start belongs to `launcher`."""
