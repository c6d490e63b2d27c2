"""Adapter with the settings and numbers of processes that the conformance suite runs it with."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from distributed.backends import backend_class, entry_in_use, make_backend
from distributed.backends.base import Backend, reason_of
from distributed.backends.capabilities import Capabilities, capabilities_of
from distributed.backends.keras_scripts import keras_engine
from distributed.backends.torch_base import TorchBackend
from distributed.config.merging import Overrides, merge
from distributed.config.plan import ProcessPlan
from distributed.config.reading import parse_yaml
from distributed.config.registry import BackendEntry, backend_entry, default_backend
from distributed.config.settings import DistributedConfig, canonical
from distributed.errors import ConfigError

_TEXT = re.compile(r"(?P<backend>[^\[\]:]+)(\[(?P<settings>[^\[\]]+)\])?(:(?P<sizes>.*))?")


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Backend with the settings and numbers of processes to test it with. Its properties, such as support for float64, are read
    from the backend."""

    backend: str
    world_sizes: tuple[int, ...] = ()  # default: 1 for a backend of one process, else 2 and 3
    # settings of every run, such as {"fsdp.cpu_offload": True}
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""  # name in messages and tables; default: the backend with its settings
    model: str = ""  # kind of model, "torch" or "keras"; default: what the backend trains

    def __post_init__(self) -> None:
        """Raise ConfigError if the suite has no models for the backend, or if the backend cannot run that many processes."""
        entry = self._entry
        if not self.world_sizes:
            object.__setattr__(self, "world_sizes", (1,) if entry.single_process else (2, 3))
        if entry.single_process and max(self.world_sizes) > 1:
            raise ConfigError(
                f"backend={self.backend!r} does not work with {max(self.world_sizes)} processes, it runs one: write"
                f" {self.backend}:1"
            )
        if not self.model:
            object.__setattr__(self, "model", _model_of(entry))

    @classmethod
    def parse(cls, text: str) -> Adapter:
        """Parse `NAME`, `NAME:1,2,3` or `NAME[SETTING=VALUE,...]:1,2,3`.

        An option of the backend is written without its option group: `deepspeed[zero_stage=3]:2`. Raises ConfigError for
        anything else.
        """
        found = _TEXT.fullmatch(text)
        backend = found["backend"] if found else text.partition("[")[0].partition(":")[0]
        backend_entry(backend)
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
        """Adapter of one process to compare with. Its backend does not communicate between processes, if such a backend exists."""
        backend = self._entry.alone if self.model == "keras" else default_backend(1)
        return Adapter(backend, (1,), model=self.model)

    @property
    def _entry(self) -> BackendEntry:
        return entry_in_use(DistributedConfig(**canonical({"backend": self.backend, **self.settings})[0]), self.backend)

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the backend."""
        return capabilities_of(backend_entry(self.backend))

    def check(self, **settings: Any) -> None:
        """Raise ConfigError if the adapter refuses these settings together with its own, and ResourceError if a
        library is missing."""
        self._made(**settings)

    def _made(self, **settings: Any) -> Backend[Any]:
        given, _ = canonical({"backend": self.backend, **self.settings, **settings})
        return make_backend(merge(Overrides(), given), ProcessPlan(1, self.world_sizes[0], "cpu", self.backend))

    def gives(self, need: str) -> bool:
        """Return whether callbacks may use the feature `need` under the adapter's settings (see `Callback.needs`)."""
        if self.capabilities.missing:  # nothing is run
            return need not in self.capabilities.refuses
        backend = self._made()
        return not reason_of(backend, backend.refuses_callbacks.get(need, ()))

    def takes(self, **settings: Any) -> bool:
        """Return True if the adapter accepts these settings together with its own."""
        try:
            self.check(**settings)
        except ConfigError:
            return False
        return True

    @property
    def has_float64(self) -> bool:
        """Return whether the adapter supports float64, so that it can be measured exactly."""
        return self.takes(dtype="float64")

    def flags(self, world_size: int) -> list[str]:
        """Return the flags of `distributed train` for this adapter."""
        settings = [word for name, value in self.settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        return ["--backend", self.backend, "--nproc-per-node", str(world_size), *settings]


def _model_of(entry: BackendEntry) -> str:
    """Return the kind of models that the backend of `entry` trains."""
    if keras_engine(entry.environ) not in (None, "torch"):
        return "keras"
    if not issubclass(backend_class(entry.name), TorchBackend):
        raise ConfigError(
            f"backend={entry.name!r} trains neither torch modules nor Keras models, and the suite has no others: test it by a"
            " script of its own, as tests/unit/test_new_engine.py does"
        )
    return "torch"


def _setting(backend: str, text: str) -> tuple[str, Any]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise ConfigError(f"{text!r} has no SETTING=VALUE form: write {backend}[SETTING=VALUE]:1,2,3")
    if name in backend_class(backend).Options.__dataclass_fields__:
        name = f"{backend_entry(backend).group}.{name}"
    try:
        return name, parse_yaml(value.encode())
    except ValueError:
        raise ConfigError(f"{name}={value!r} is not YAML: write a number, a word, true or false") from None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
