"""Test doubles (`FakeBackend`) and the conformance suite for adapters; comparing the backends on a user's script belongs in `parity`."""

from distributed.testing.adapter import Adapter
from distributed.testing.fake import FakeBackend, FakeData, FakeOptions

__all__ = ["Adapter", "FakeBackend", "FakeData", "FakeOptions"]
