"""Compares the samples with the documents: a line that differs must be of a kind that the top of the sample names."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

HERE = Path(__file__).parent
DOCUMENTS = HERE.parents[2] / "shared" / "seeds"  # beside the checkout; they are not part of the repository

# A word in the list of changes -> the lines that it accounts for, as they stand in the document or in the sample.
KINDS = {
    "import": r"^\s*(from \S+ )?import ",
    "module": r"python -m ",
    "flags follow --": r"^    (-- )?--(hidden-size|attention-heads|layers) ",
    "flags of the tables": r"^    --(gradient-clip-norm 1.0|no-nccl) ",
    "no GPUs to name": r"^# Setup training environment|^export CUDA_VISIBLE_DEVICES=",
    "no GPUs to ask for": r"^#SBATCH --(gres|partition)=gpu",
    "process": r"(n(proc|tasks).per.node|num.gpus|gpus.per.node|world.size|WORLD_SIZE|-np)\b",
    "on 1 node": r"\bnnodes=",
    "2 nodes": r"\bnnodes=|-nodes[= ]\d",
    "the address": r"(?i)master.addr|--address ",
    "a free port": r"(?i)master.port",
    "Gloo": r"--gloo ",
    "gloo": r"backend=",
    "the CPU": r"\.(cuda|cpu|to)\(|\bdevice ?=|DDP\(model|pin_memory|^# Pin to local GPU|cuda\.set_device|^model = YourModel\(",
    "rank that its launcher gave": r"\brank=",
    "optimizer of this model": r"^\s*optimizer = torch\.optim\.SGD\(",
    "the logger": r"^logger = ",
    "workers": r"\bnum_workers=",
    "epoch": r"epochs( = |=| )\d|checkpoint_frequency=",
    "batch": r"batch.size[ =]\d",
    "layers": r"\b(Linear|Dense)\(",
    "rate": r"learning_rate=",
    "size": r"--(batch-size|epochs|save-interval) \d|\b(Linear|Dense)\(|hidden_size",
    "steps": r"max.steps[ =]\d",
    "trials": r"num_samples=|resources_per_trial=",
    "no GPUs, ": r"\bnum_gpus=",
    "run directory": r"--run-dir run$|--backend pytorch-ddp",
    "bf16 instead of fp16": r'"(bf|fp)16": ',
    "no offload": r'"stage": |offload|"device": "cpu"|"pin_memory"|^        }$',
    "torch's AdamW": r'"torch_adam": ',
    "the rate": r'"lr": ',
}


def mend(line: str) -> str:
    """Undo what three of the documents went through: their UTF-8 was read as Mac Roman."""
    try:
        return line.encode("mac_roman").decode()
    except UnicodeError:
        return line


def code_of(lines: list[str]) -> list[str]:
    return [line.rstrip() for line in lines if line.strip()]


def rows() -> list[tuple[str, int, list[str]]]:
    """(document, line, samples) of each row of the list that has samples."""
    found, document = [], ""
    for line in (HERE / "README.md").read_text().splitlines():
        if line.startswith("## "):
            document = line[3:6]
        elif line.startswith("| ") and (samples := re.findall(r"\]\(samples/(00\d/\w+\.\w+)\)", line)):
            found.append((document, int(line.split()[1]), samples))
    return found


def in_document(document: str, line: int) -> list[str]:
    """The code block of a document whose fence is `line`."""
    (path,) = DOCUMENTS.glob(f"{document}_*.txt")
    lines = [mend(each) for each in path.read_text().splitlines()][line - 1 :]
    assert lines[0].startswith("```"), (document, line)
    return code_of(lines[1 : lines.index("```", 1)])


def in_sample(sample: str) -> tuple[str, list[str]]:
    """(the line that lists the changes, the code) of a sample."""
    lines = (HERE / "samples" / sample).read_text().splitlines()
    (head,) = [line for line in lines[:2] if line.startswith(f'# {sample[:3]}, "')]
    return head, code_of([line for line in lines if line != head])


def unlisted(document: str, line: int, samples: list[str]) -> tuple[list[str], int]:
    """(lines that are not the document's and of no kind that is listed, the number of them that the lists give).

    Several samples are the parts of one code block.
    """
    heads, codes = zip(*map(in_sample, samples), strict=True)
    changes = " ".join(head.split('". ', 1)[1] for head in heads)
    listed = [pattern for word, pattern in KINDS.items() if word in changes]
    theirs, ours = (
        [line for line in code if not any(re.search(pattern, line) for pattern in listed)]
        for code in (in_document(document, line), [line for code in codes for line in code])
    )
    differing = [each for each in difflib.ndiff(theirs, ours) if each[0] in "-+"]
    return differing, sum(map(int, re.findall(r"\((\d+) lines?\)", changes)))
