"""Make a process of Ray's client server die, as it happens now and then by itself (ray issue 63202).

This file is on the path of a head. If the file FAILING_SERVER exists, the next process that the client server forks for a client
dies between fork and exec, and the file is removed.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


class Popen(subprocess.Popen):
    def __init__(self, command, **arguments):
        flag = Path(os.environ["FAILING_SERVER"])
        if "--mode=specific-server" in command and flag.exists():
            flag.unlink()
            arguments["preexec_fn"] = lambda: os.kill(os.getpid(), signal.SIGSEGV)
        super().__init__(command, **arguments)


if "--mode=proxy" in sys.orig_argv:
    subprocess.Popen = Popen
