"""For tests of what stands on the adapters (`FakeBackend`), and of an adapter itself (`conformance`). The project's own tests lie in tests/."""

from distributed.testing.adapter import Adapter
from distributed.testing.fake import FakeBackend, FakeData, FakeOptions

__all__ = ["Adapter", "FakeBackend", "FakeData", "FakeOptions"]
