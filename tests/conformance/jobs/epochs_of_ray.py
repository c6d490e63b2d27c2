"""Define a user's callback of Ray Train, which writes what Ray receives after each epoch."""

import json
from pathlib import Path

from ray.train import UserCallback


class Epochs(UserCallback):
    def after_report(self, run_context, metrics, checkpoint):
        assert metrics[0] == metrics[1]  # one entry for each of two ranks
        with Path(run_context.get_run_config().storage_path, "epochs.jsonl").open("a") as file:
            file.write(json.dumps(metrics[0]) + "\n")
