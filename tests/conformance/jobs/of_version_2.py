"""Run the job of the old runs with the order and the random numbers of version 2, in which they were written.

of_version_2.py [arguments of tests/data/checkpoints/job.py]
"""

import functools
import runpy
from pathlib import Path

from distributed.state import TrainState
from distributed.training import session

session.TrainState = functools.partial(TrainState, data_version=2)
runpy.run_path(str(Path(__file__).parents[2] / "data" / "checkpoints" / "job.py"), run_name="__main__")
