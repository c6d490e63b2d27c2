"""Look models and optimizers up by the names of the models."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ByName(Generic[T]):
    """Give an object the methods of a mapping.

    This is not a `collections.abc.Mapping`, because a Mapping compares by content, while modules and optimizers are compared
    by identity.
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
        """Return the object named `name`, or `default`."""
        return self._by_name.get(name, default)

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self._by_name.keys()

    def values(self) -> ValuesView[T]:
        """Return the objects."""
        return self._by_name.values()

    def items(self) -> ItemsView[str, T]:
        """Return the pairs of name and object."""
        return self._by_name.items()
