"""Detect that a script has joined other processes with TensorFlow's own means. Does not import TensorFlow."""

from __future__ import annotations

import sys


def has_joined() -> bool:
    """Return True if the script has made a strategy or a server for a cluster of several tasks."""
    module = sys.modules.get("tensorflow.python.eager.context")
    context = getattr(module, "_context", None)
    server = getattr(context, "_server_def", None) or getattr(context, "_collective_ops_server_def", None)
    if server is None or sum(len(job.tasks) for job in server.cluster.job) < 2:
        return False
    start = sys.modules.get("distributed.backends._tensorflow.start")
    return start is None or bool(start.is_used_by_script())
