"""One row for each adapter that the conformance suite runs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from distributed.backends import make_backend
from distributed.backends.capabilities import Capabilities, capabilities_of
from distributed.config.merging import Typed, merge
from distributed.config.plan import ProcessPlan
from distributed.config.registry import BackendRow, backend_class, backend_row, default_backend, row_in_use
from distributed.config.settings import DistributedConfig, canonical
from distributed.errors import ConfigError

_ROW = re.compile(r"(?P<backend>[^\[\]:]+)(\[(?P<settings>[^\[\]]+)\])?(:(?P<sizes>.*))?")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter and what it is tried with. What it takes, float64 say, the suite asks the adapter itself."""

    backend: str
    world_sizes: tuple[int, ...] = (2, 3)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of every run: {"fsdp.cpu_offload": True}
    name: str = ""  # for messages and tables; by itself the backend's, with its settings
    model: str = ""  # the kind of model it trains, "torch" or "keras"; by itself what the backend is for

    def __post_init__(self) -> None:
        if not self.model:
            engine = self._row.environ.get("KERAS_BACKEND")
            object.__setattr__(self, "model", "torch" if engine == "torch" else "keras")

    @classmethod
    def parse(cls, text: str) -> Adapter:
        """The row that `NAME`, `NAME:1,2,3` or `NAME[SETTING=VALUE,...]:1,2,3` describes.

        An option of the backend's own needs no group: `deepspeed[zero_stage=3]:2`. ConfigError for anything else.
        """
        found = _ROW.fullmatch(text)
        backend = found["backend"] if found else text.partition("[")[0].partition(":")[0]
        backend_row(backend)
        if found is None:
            raise ConfigError(f"{text!r} does not name an adapter: write {backend}[SETTING=VALUE]:1,2,3")
        settings = dict(_setting(backend, each) for each in (found["settings"] or "").split(",") if each)
        DistributedConfig(**canonical({"backend": backend, **settings})[0])
        if found["sizes"] is None:
            return cls(backend, settings=settings)
        sizes = found["sizes"].split(",")
        if not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ConfigError(f"{text!r} does not name numbers of processes: write {backend}:1,2,3")
        return cls(backend, tuple(map(int, sizes)), settings)

    def __str__(self) -> str:
        more = ",".join(f"{name.rpartition('.')[2]}={_text(value)}" for name, value in self.settings.items())
        return self.name or (f"{self.backend}[{more}]" if more else self.backend)

    @property
    def reference(self) -> Adapter:
        """One process, which it is compared with: without communication where there is a backend for that."""
        backend = self._row.alone if self.model == "keras" else default_backend(1)
        return Adapter(backend, (1,), model=self.model)

    @property
    def _row(self) -> BackendRow:
        return row_in_use(DistributedConfig(**canonical({"backend": self.backend, **self.settings})[0]), self.backend)

    @property
    def capabilities(self) -> Capabilities:
        """What it says of itself."""
        return capabilities_of(backend_row(self.backend))

    def check(self, **settings: Any) -> None:
        """ConfigError where it refuses these settings beside its own, ResourceError where a library is missing."""
        given, _ = canonical({"backend": self.backend, **self.settings, **settings})
        make_backend(merge(Typed(), given), ProcessPlan(1, self.world_sizes[0], "cpu", self.backend))

    def takes(self, **settings: Any) -> bool:
        """Whether it can be made with these settings beside its own."""
        try:
            self.check(**settings)
        except ConfigError:
            return False
        return True

    @property
    def has_float64(self) -> bool:
        """Whether it can be measured exactly."""
        return self.takes(dtype="float64")

    def flags(self, world_size: int) -> list[str]:
        """Of `distributed train`."""
        settings = [word for name, value in self.settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        return ["--backend", self.backend, "--nproc-per-node", str(world_size), *settings]


def _setting(backend: str, text: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise ConfigError(f"{text!r} has no SETTING=VALUE form: write {backend}[SETTING=VALUE]:1,2,3")
    if name in backend_class(backend).Options.__dataclass_fields__:
        name = f"{backend_row(backend).group}.{name}"
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"{name}={value!r} is not YAML: write a number, a word, true or false") from None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
