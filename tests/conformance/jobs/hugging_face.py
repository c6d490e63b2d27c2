"""Train Hugging Face models, save each with `save_pretrained`, load it again and write its content.

Writes for each case into the directory given: CASE.safetensors, the weights of the loaded model, and CASE.json, facts of rank 0.
"""

import copy
import io
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from distributed import Callback, Trainer
from distributed.testing.jobs.cases import freeze

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
OUT, BACKEND, CASES = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
GPT = {
    "vocab_size": 11,
    "n_positions": 8,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
BERT = {
    "vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20,
    "max_position_embeddings": 8,
}  # fmt: skip


class Tokens(torch.utils.data.Dataset):
    """Hold tokens with a label for each sample, or with the tokens themselves as labels."""

    def __init__(self, num_labels=None):
        self.num_labels = num_labels

    def __len__(self):
        return 22

    def __getitem__(self, i):
        tokens = (torch.arange(8) * (1 + i % 3) + i) % 11
        return {"input_ids": tokens, "labels": tokens if self.num_labels is None else torch.tensor(i % self.num_labels)}


class LoRALinear(torch.nn.Module):
    """Add the trained product of two thin matrices to a frozen linear layer."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.down = torch.nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = torch.nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def gpt():
    """Return a GPT whose last weight is shared with its first."""
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(**GPT))


def classifier():
    torch.manual_seed(3)
    return BertForSequenceClassification(BertConfig(**BERT, num_labels=3))


def frozen():
    """Return a model in which only the adapters in the attention and the head are trained."""
    model = classifier()
    for parameter in model.bert.parameters():
        parameter.requires_grad_(False)
    for layer in model.bert.encoder.layer:
        layer.attention.self.query = LoRALinear(layer.attention.self.query)
    return model


def adapted():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(gpt(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


class Saving(Callback):
    """Save the model that `whole_model` yields in the middle of the fit."""

    def __init__(self, path):
        self.path, self.trainer = path, None

    def on_epoch_end(self, state, metrics):
        with self.trainer.whole_model() as model:
            assert (model is not None) == self.trainer.is_main_process
            if model is not None:
                model.save_pretrained(self.path)


MAKE = {"gpt": gpt, "classifier": classifier, "frozen": frozen, "adapted": adapted}


def load(name, path):
    if name == "adapted":
        from peft import PeftModel

        return PeftModel.from_pretrained(gpt(), path, is_trainable=True)
    if name == "frozen":  # its classes are defined in this script
        model = frozen()
        model.load_state_dict(transformers.modeling_utils.load_state_dict(path / "model.safetensors"))
        return model
    return MAKE[name]().from_pretrained(path)


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run(case, name, **settings):
    data = Tokens(3 if name in ("classifier", "frozen") else None)
    model, saving = MAKE[name](), Saving(OUT / f"{case}-in-fit")
    trainer = Trainer(
        model,
        backend=BACKEND,
        epochs=1,
        global_batch_size=8,
        learning_rate=1e-2,
        callbacks=[saving],
        verbose=False,
        **settings,
    )
    saving.trainer = trainer
    run_dir = trainer.fit(data, data).run_dir
    held = weights(model)
    if trainer.is_main_process:
        trainer.model.save_pretrained(OUT / case)
        loaded = weights(load(name, OUT / case))
        save_file(loaded, OUT / f"{case}.safetensors")
    trainer.save_pretrained(OUT / f"{case}-by-trainer")
    copied, pickled = copy.deepcopy(model), io.BytesIO()
    torch.save(model, pickled)
    facts = {
        "is_the_users": trainer.model is model and type(model) is type(MAKE[name]()),
        "kinds": sorted({type(value).__name__ for value in (*held.values(), *model.parameters())}),
        "in_fit": trainer.is_main_process and same(weights(load(name, saving.path)), loaded),
        "by_trainer": trainer.is_main_process and same(weights(load(name, OUT / f"{case}-by-trainer")), loaded),
        "copied": same(weights(copied), held),
        "trainable": [each for each, p in model.named_parameters() if p.requires_grad]
        == [each for each, p in MAKE[name]().named_parameters() if p.requires_grad],
        "run_dir": run_dir,
    }
    first = next(model.parameters())
    before = trainer.evaluate(data)
    facts["evaluated_twice"] = trainer.evaluate(data) == before and same(weights(model), held)
    again = trainer.fit(data, data)  # continues from the state of the workers, not from a whole model
    facts["further"] = again.rows[-1]["val_loss"]
    facts["goes_on"] = next(model.parameters()) is first and not same(weights(model), held)
    trainer.save(OUT / f"{case}-further.safetensors")
    if trainer.is_main_process:
        (OUT / f"{case}.json").write_text(json.dumps(facts))


def in_pieces(case, name):
    """Train as if there were no memory for the whole model. A notice says so, and the numbers are the same."""
    from distributed.backends._torch import whole

    whole.free_bytes = lambda device, num_sharing: 0
    data, model = Tokens(), MAKE[name]()
    trainer = Trainer(model, backend=BACKEND, epochs=1, global_batch_size=8, learning_rate=1e-2)
    trainer.fit(data, data)
    kinds = sorted({type(value).__name__ for value in model.parameters()})
    parts = sorted({type(getattr(value, "data", value)).__name__ for value in model.parameters()})
    with trainer.whole_model() as made:
        if made is not None:
            made.save_pretrained(OUT / case)
            save_file(weights(load(name, OUT / case)), OUT / f"{case}.safetensors")
    trainer.evaluate(data)
    further = trainer.fit(data, data).rows[-1]["val_loss"]
    trainer.save(OUT / f"{case}-further.safetensors")
    if trainer.is_main_process:
        (OUT / f"{case}.json").write_text(json.dumps({"kinds": kinds, "parts": parts, "further": further}))


def main():
    freeze()
    for case in CASES:
        name, *more = case.split("-")  # such as adapted-3 or adapted-only
        settings = {"checkpoint_trainable_only": True} if "only" in more else {}
        stages = [int(each) for each in more if each != "only"]
        run(case, name, **settings, **({"deepspeed": {"zero_stage": stages[0]}} if stages else {}))
    if BACKEND == "fsdp":
        in_pieces("gpt-in-pieces", "gpt")


if __name__ == "__main__":
    main()
