"""Run a fit inside its processes, from joining the other ranks to leaving them. Starting processes belongs to `launching`."""
