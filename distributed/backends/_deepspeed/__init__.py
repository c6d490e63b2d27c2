"""Parts of the backend `deepspeed`."""
