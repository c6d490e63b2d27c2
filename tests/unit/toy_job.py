"""Train with the toy engine, and resume. Prints JSON."""

import json
import sys

import numpy
import toy_entry  # noqa: F401 - before the settings are read
from safetensors.numpy import load_file
from toy_engine import Line

from distributed import Trainer
from distributed.errors import ConfigError

rng = numpy.random.default_rng(0)
inputs = rng.normal(size=(64, 3))
data = inputs, inputs @ [1.0, -2.0, 3.0]


def trainer(**settings):
    return Trainer(Line(3), backend="toy", batch_size=8, learning_rate=0.1, verbose=False, **settings)


first = trainer(epochs=4)
history = first.fit(data, data)
again = trainer(epochs=8, resume_from_checkpoint=history.run_dir)
more = again.fit(data, data)
again.save("line.safetensors")


def refusal(run):
    try:
        run()
    except ConfigError as error:
        return str(error)
    return ""


refused = refusal(lambda: trainer(mixed_precision="bf16"))
on_gpus = refusal(lambda: trainer(device="cuda"))
unused = refusal(lambda: trainer(metrics={"mae": abs}).fit(data))
print(
    json.dumps(
        {
            "losses": [row["val_loss"] for row in history.rows],
            "steps": more.steps,
            "weights": again.model.weights.tolist(),
            "evaluated": again.evaluate(data)["loss"],
            "predicted": numpy.abs(again.predict(data) - data[1]).max(),
            "refused": refused,
            "on_gpus": on_gpus,
            "unused": unused,
            "exported": load_file("line.safetensors")["weights"].tolist(),
            "has_torch": "torch" in sys.modules,
        }
    )
)
