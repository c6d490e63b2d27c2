"""Load and write a checkpoint at every stage of DeepSpeed, or train.

    zero_travel.py OUT begin|train|CHECKPOINT

With CHECKPOINT, each stage takes it up, hands it to the engine and writes OUT/STAGE without an update in between. OUT/saved is written
after a save that found no engine.
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from distributed import Trainer
from distributed.checkpoints.store import read_state
from tests.conformance.jobs import zero

OUT, KIND = Path(sys.argv[1]), sys.argv[2]
BASE = {"global_batch_size": 12, "epochs": 2, "seed": 1, "learning_rate": 1e-2, "gradient_clipping": 0.5}
loader = DataLoader(zero.data(), shuffle=True)


def odd():
    """Return a model with shapes that are not divisible by two or three."""
    return torch.nn.Sequential(torch.nn.Linear(zero.FEATURES, 7), torch.nn.Tanh(), torch.nn.Linear(7, zero.CLASSES))


if KIND in ("begin", "train"):
    trainer = Trainer(odd, **BASE)
    trainer.fit(loader)
    trainer.save(OUT if KIND == "begin" else OUT / "weights.safetensors")
else:
    (checkpoint,) = Path(KIND).glob("step-*")
    for name, options in (zero.STAGES | zero.OFFLOADED | {"saved": zero.STAGES["zero-1"]}).items():
        trainer = Trainer(odd, resume_from_checkpoint=KIND, deepspeed=options, **BASE)
        trainer.fit(loader)  # nothing is left to do but to save what was loaded
        if name != "saved":
            trainer.backend.load(checkpoint, read_state(checkpoint)[1])()
        held = trainer.backend.wrapper.held
        assert (held is None) == (name in ("zero-0", "saved")), name
        kept = [value for slots in trainer.backend.optimizer.state.values() for value in slots.values()]
        assert any(value.dim() for value in kept) == (held is None), "the optimizer has whole tensors"
        trainer.backend.rewrap()
        trainer.backend.wrapper.before_first_update(None)
        trainer.save(OUT / name)
        trainer.backend.reassemble()
        trainer.backend.unwrap()
