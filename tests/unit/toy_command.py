"""Run `python -m MODULE ARGUMENTS` of this package with the toy engine in its registry.

toy_command.py MODULE ARGUMENTS
"""

import runpy
import sys

import toy_entry  # noqa: F401 - before the settings are read

del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
