"""Run a fit inside its processes, from joining the other ranks to leaving them; starting processes belongs in `launching`."""
