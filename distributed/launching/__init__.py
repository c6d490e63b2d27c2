"""Starts worker processes, watches them, and makes a process a worker; what is checked before a start belongs in `launcher`."""
