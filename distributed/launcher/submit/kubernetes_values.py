"""Values of flags that Kubernetes accepts: names, images and quantities."""

from __future__ import annotations

import re
from collections.abc import Sequence

from distributed.errors import ConfigError

_DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_DNS_NAME = rf"(?=.{{1,253}}$){_DNS_LABEL}(\.{_DNS_LABEL})*"
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|[MGTPE]|[KMGTPE]i)?")
_UNITS = {"": 1.0, "m": 1e-3, **{unit: 1e3**power for power, unit in enumerate("kMGTPE", 1)},
          **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)}}  # fmt: skip
_LEAST_MEMORY = 2.0**20  # bytes; less is a number without its unit
# flag -> (what its value is matched with, what is wrong with another one, what to give)
FORMS = {
    "image": (r"[\w./:@-]+", "is not the name of an image", "give one without spaces, such as registry.example/train:1"),
    "namespace": (_DNS_LABEL, "is not a name in Kubernetes", "use lower-case letters, digits and dashes, at most 63 characters"),
    "claim": (_DNS_NAME, "is not a name in Kubernetes", "use lower-case letters, digits, dashes and dots"),
    "secret": (_DNS_NAME, "is not a name in Kubernetes", "use lower-case letters, digits, dashes and dots"),
    "gpu-resource": (rf"{_DNS_NAME}/[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", "is not a resource with a domain", "give DOMAIN/NAME, such as nvidia.com/gpu"),
    "working-dir": (r"/.*", "is not an absolute path", "name a directory of the image, such as /app"),
}  # fmt: skip


def check_form(name: str, values: Sequence[str]) -> None:
    """Raise ConfigError if a value of the flag `name` does not have the form that Kubernetes wants."""
    form, wrong, fix = FORMS[name]
    for value in values:
        if not re.fullmatch(form, value, re.ASCII):
            raise ConfigError(f"--{name} {value or repr(value)} {wrong}: {fix}")


def amount(quantity: str, name: str) -> float:
    """Return a quantity of Kubernetes, given with the flag `name`, as a number of CPUs or bytes.

    Raises ConfigError if it is none, or so small that no pod can run with it.
    """
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        raise ConfigError(f"--{name} {quantity} is not a quantity of Kubernetes: write 8, 500m, 32Gi")
    found = float(match[1]) * _UNITS[match[2] or ""]
    if name == "cpus" and found <= 0:
        raise ConfigError(f"--cpus {quantity} is no CPU: give more, such as 8 or 500m")
    if name != "cpus" and found < _LEAST_MEMORY:
        raise ConfigError(f"--{name} {quantity} is less than 1Mi: give a size with its unit, such as 32Gi")
    return found
