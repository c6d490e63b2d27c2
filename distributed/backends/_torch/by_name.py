"""Look models and optimizers up by the names of the models."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ByName(Generic[T]):
    """Give an object the methods of a mapping.

    It is no `collections.abc.Mapping`, which compares by content: modules and optimizers are compared by identity.
    """

    _by_name: dict[str, T]

    def __getitem__(self, name: str) -> T:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def get(self, name: str, default: Any = None) -> Any:
        """Return what is called `name`, or `default`."""
        return self._by_name.get(name, default)

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self._by_name.keys()

    def values(self) -> ValuesView[T]:
        """Return what the names stand for."""
        return self._by_name.values()

    def items(self) -> ItemsView[str, T]:
        """Return the names and what they stand for."""
        return self._by_name.items()
