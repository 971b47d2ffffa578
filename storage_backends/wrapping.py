"""A backend that passes operations on to another one."""

from __future__ import annotations

from .base import Conditions, StorageBackend


class WrappingBackend(StorageBackend):
    """Passes operations on to another backend; a subclass adds reads and writes.

    Attributes:
        inner: The other backend.
    """

    def __init__(self, inner: StorageBackend) -> None:
        self.inner, self.options = inner, inner.options
        self.is_remote, self.read_size, self.atomic_writer = inner.is_remote, inner.read_size, inner.atomic_writer

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def deadline_s(self) -> float:
        return self.inner.deadline_s

    @deadline_s.setter
    def deadline_s(self, value: float) -> None:
        self.inner.deadline_s = value

    def endpoint(self) -> str:
        return self.inner.endpoint()

    def conditions(self) -> Conditions:
        return self.inner.conditions()

    def staleness_s(self) -> float:
        return self.inner.staleness_s()

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    def close(self) -> None:
        self.inner.close()
