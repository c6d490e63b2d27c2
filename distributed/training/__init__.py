"""What a Trainer does inside its processes, from joining to leaving. How processes are started belongs to `launching`."""
