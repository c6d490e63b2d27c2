"""`python -m distributed.launcher SCRIPT`."""

import sys

from distributed.launcher.scripts import main

sys.exit(main(sys.argv[1:]))
