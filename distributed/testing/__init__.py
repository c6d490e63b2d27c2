"""Test doubles for code above the adapters (`FakeBackend`), and checks for an adapter (`conformance`). The project's own tests belong to tests/."""

from distributed.testing.adapter import Adapter
from distributed.testing.fake import FakeBackend, FakeData, FakeOptions

__all__ = ["Adapter", "FakeBackend", "FakeData", "FakeOptions"]
