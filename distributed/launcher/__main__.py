"""`python -m distributed.launcher SCRIPT`."""

import sys

from distributed.launcher.scripts import main
from distributed.runs.processes import leave

leave(main(sys.argv[1:]))
