"""Put the progress of a run into words: numbers, durations, a line that fits into a given width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SHORT_NAMES = {"learning_rate": "lr"}
_NOT_METRICS = {"epoch", "epochs", "step", "validations", "samples_per_second", "learning_rate"}
GAP = "  "
# If a line is too long, its parts are left out in this order.
_NEEDED = ("elapsed", "epoch", "samples/s", "loss", "ETA", "step")
_SHORTEST_BAR = 8


def progress_parts(event: Mapping[str, Any]) -> list[str]:
    """Return the parts of a line about `event`.

    The parts are `step 50/230`, `epoch 1/5`, the metrics, `1234 samples/s` and `3 s, ETA 12 s`. A part without a value in
    `event` is left out.
    """
    counts = (("step", "total_steps"), ("epoch", "epochs"))
    parts = [_of(name, event.get(name), event.get(total)) for name, total in counts]
    parts += [f"{_SHORT_NAMES.get(name, name)} {number(value)}" for name, value in (event.get("metrics") or {}).items()]
    if (rate := event.get("samples_per_second")) is not None:
        parts.append(f"{rate:.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s")
    parts.append(_times(event.get("elapsed_s"), event.get("eta_s")))
    return [part for part in parts if part]


def _times(elapsed_s: float | None, eta_s: float | None) -> str:
    if eta_s is None:
        return "" if elapsed_s is None else f"elapsed {duration(elapsed_s)}"
    return ("" if elapsed_s is None else f"{duration(elapsed_s)}, ") + f"ETA {duration(eta_s)}"


def epoch_line(row: Mapping[str, Any]) -> str:
    """Return the line of a row: `epoch 1/5  loss 0.31  val_loss 0.25`. The line of a validation inside an epoch begins with `step 50`."""
    step = [_of("step", row.get("step"), None)] if "validations" in row else []
    metrics = [f"{_SHORT_NAMES.get(k, k)} {number(v)}" for k, v in row.items() if k not in _NOT_METRICS]
    return GAP.join([*step, _of("epoch", row.get("epoch"), row.get("epochs")), *metrics])


def number(value: Any) -> str:
    """Return a metric in four digits, or with all digits before the point: `0.1234`, `1e-3`, `12.5`, `12780`."""
    if not isinstance(value, float):
        return str(value)
    if value != 0 and abs(value) < 0.01:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return `12 s`, `3 min 20 s` or `2 h 05 min`."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"


def middle_cut(text: str, width: int) -> str:
    """Return `text` with "..." in the place of its middle if it is longer than `width`."""
    if len(text) <= width:
        return text
    end = max(width - 3, 2) // 2
    return f"{text[: max(width - 3, 2) - end]}...{text[-end:]}"


def _of(word: str, value: Any, total: Any) -> str:
    if value is None:
        return ""
    return f"{word} {value}" if total is None else f"{word} {value}/{total}"


def bar_line(event: Mapping[str, Any], width: int) -> str:
    """Return a bar and the parts of `event` that fit into `width` columns.

    The least important parts are left out first.
    """
    parts = progress_parts(event)
    step, total = event.get("step"), event.get("total_steps")
    has_bar = bool(total) and step is not None and width >= 40
    room = width - 1 - (_SHORTEST_BAR + len(GAP) if has_bar else 0)
    while parts and len(GAP.join(parts)) > room:
        parts.pop(_least(parts))
    text = GAP.join(parts)
    if not has_bar:
        return text
    bar_width = min(30, width // 5, width - 1 - len(GAP) - len(text))
    done = round(bar_width * min(1.0, step / total)) if step is not None and total else 0
    return "━" * done + "─" * (bar_width - done) + GAP + text


def _least(parts: Sequence[str]) -> int:
    """Return the index of the least important part: a metric other than the loss, then the epoch, the
    throughput, the loss.
    """
    kinds = [next((kind for kind in _NEEDED if f" {kind} " in f" {part} "), "") for part in parts]
    for kind in ("", *_NEEDED):
        if kind in kinds:
            return len(kinds) - 1 - kinds[::-1].index(kind)
    return len(parts) - 1
