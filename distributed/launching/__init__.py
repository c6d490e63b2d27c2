"""Start worker processes, watch them, and make a process a worker; what is checked before a start belongs in `launcher`."""
