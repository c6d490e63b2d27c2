"""The examples in the help of each command. A test parses every line with the command's own parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Words after `distributed` -> lines as a user types them.
EXAMPLES: Mapping[str, Sequence[str]] = {
    "": (
        "distributed init --kind image digits",
        "distributed train --script digits/train.py",
        "distributed runs --sort val_loss",
    ),
    "init": (
        "distributed init",
        "distributed init --kind text reviews",
        "distributed init --kind tabular prices",
        "distributed init --script train.py",
    ),
    "train": (
        "distributed train --script train.py --nproc-per-node 2 --epochs 3",
        "distributed train --script train.py --backend fsdp --set fsdp.cpu_offload=true",
        "distributed train --config runs/first/config.yaml --run-dir runs/second",
        "distributed train --script train.py --run-dir runs/first --resume",
        "distributed train --script train.py --dry-run -- --data images",
    ),
    "tune": (
        "distributed tune --script train.py --search-space space.yaml --num-samples 20",
        "distributed tune --script train.py --search-space space.yaml --search grid",
        "distributed tune --script train.py --search-space space.yaml \\\n"
        "    --num-samples 50 --scheduler asha --metric val_accuracy --mode max",
    ),
    "backends": ("distributed backends", "distributed backends fsdp", "distributed backends --json"),
    "parity": (
        "distributed parity --script train.py",
        "distributed parity --script train.py --backends fsdp,horovod --world-sizes 2",
        "distributed parity --script train.py --steps 10 --keep parity -- --data images",
    ),
    "runs": (
        "distributed runs",
        "distributed runs --where 'val_loss<0.3' --where backend=fsdp --sort val_loss",
        "distributed runs runs/digits-* --sort duration --reverse --limit 5",
        "distributed runs --where status=failed --where 'age>7d' --delete",
    ),
    "status": ("distributed status runs/first", "distributed status runs/first --once"),
    "why": ("distributed why runs/first", "distributed why runs/first --json"),
    "compare": (
        "distributed compare runs/first runs/second",
        "distributed compare runs/first runs/second --metric val_accuracy",
        "distributed compare runs/* --json",
    ),
    "export": (
        "distributed export runs/first",
        "distributed export runs/first model.onnx --format onnx --script train.py",
        "distributed export train.py --format torch-export --dry-run",
    ),
    "report": (
        "distributed report runs/first",
        "distributed report runs/first runs/second --compare --output both.html",
    ),
    "submit": (
        "distributed submit slurm --script train.py --num-nodes 2 --time 4:00:00",
        "distributed submit status runs/first",
        "distributed submit stop runs/first",
    ),
    "submit slurm": (
        "distributed submit slurm --script train.py --num-nodes 2 --gpus-per-node 8 \\\n    --time 12:00:00 --partition gpu",
        "distributed submit slurm --script train.py --time 1:00:00 --dry-run",
        "distributed submit slurm --script train.py --time 1:00:00 \\\n    --grid learning_rate=1e-3,1e-4 --grid seed=0,1",
    ),
    "submit kubernetes": (
        "distributed submit kubernetes --script train.py --num-nodes 2 \\\n"
        "    --gpus-per-node 8 --image registry.example/train:1 --claim runs",
    ),
    "submit ray": (
        "distributed submit ray --script train.py --address http://head:8265 \\\n    --nproc-per-node 4 --storage /shared",
    ),
    "checkpoint": ("distributed checkpoint list runs/first", "distributed checkpoint verify runs/first"),
    "checkpoint list": (
        "distributed checkpoint list runs/first",
        "distributed checkpoint list s3://bucket/runs/first",
    ),
    "checkpoint verify": (
        "distributed checkpoint verify runs/first",
        "distributed checkpoint verify runs/first/checkpoints/step-00000120",
    ),
    "checkpoint export": (
        "distributed checkpoint export runs/first model.safetensors",
        "distributed checkpoint export runs/first model.safetensors --force",
    ),
    "checkpoint convert": (
        "distributed checkpoint convert model.ckpt model.safetensors",
        "distributed checkpoint convert global_step10 model.safetensors --trust",
    ),
    "mlflow-sync": ("distributed mlflow-sync runs/first",),
    "doctor": (
        "distributed doctor",
        "distributed doctor --num-nodes 2 --node-rank 0 --master-addr node0",
    ),
}


def examples_text(command: str) -> str:
    """Return the section with the examples of `command`, which is the words after `distributed`."""
    return "\n".join(["Examples:", *(f"  {line}".replace("\n", "\n  ") for line in EXAMPLES[command]), ""])
