"""Train in fp16 on a CPU, which DeepSpeed is made to allow. OUT/STAGE.json has the loss scale after each update."""

import json
import sys
from pathlib import Path

from distributed import Callback, Trainer
from distributed.backends import deepspeed as adapter
from tests.conformance.jobs import zero

OUT = Path(sys.argv[1])
BASE = {"global_batch_size": 12, "epochs": 4, "seed": 1, "learning_rate": 1e-2, "gradient_clipping": 0.5}
FP16 = {"mixed_precision": "fp16", "scaler_init_scale": 2.0**40, "scaler_growth_interval": 4}


class Watch(Callback):
    def on_train_start(self, state):
        self.scales, self.skipped, self.kinds = [], [], []

    def on_step_end(self, state, result):
        self.scales.append(self.trainer.backend.precision.loss_scale.scale)
        self.skipped += [state.step] * result.skipped
        self.kinds.append(str(next(self.trainer.model.parameters()).dtype))


def pretend():
    """Make DeepSpeed believe that the processor has fp16."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True


adapter.HAS_FP16_ON_CPU = True
Trainer(zero.net, **BASE).evaluate(zero.data())  # loads DeepSpeed
pretend()
for stage in (1, 2, 3):
    options = {"deepspeed": {"zero_stage": stage}}
    plain = Trainer(zero.net, **BASE, **options).fit(zero.data(), zero.data())
    watch = Watch()
    watch.trainer = trainer = Trainer(zero.net, callbacks=[watch], **BASE, **FP16, **options)
    trainer.fit(zero.data())
    calm = Trainer(
        zero.net, **BASE, **FP16 | {"scaler_init_scale": 1024.0, "scaler_growth_interval": 2000}, **options
    ).fit(zero.data(), zero.data())
    trainer.save(OUT / str(stage))
    again = Trainer(zero.net, resume_from_checkpoint=str(OUT / str(stage)), **BASE, **FP16, **options)
    again.fit(zero.data())  # nothing is left to do
    found = {
        "scales": watch.scales, "skipped": watch.skipped, "kinds": watch.kinds, "loss": calm.rows[-1]["val_loss"],
        "fp32": plain.rows[-1]["val_loss"], "resumed": again.backend.precision.state(),
    }  # fmt: skip
    if trainer.is_main_process:
        (OUT / f"{stage}.json").write_text(json.dumps(found))
