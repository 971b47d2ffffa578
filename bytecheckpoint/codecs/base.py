"""The codec interface: how a piece of a file is made smaller, and bounded when it is made whole again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from typing_extensions import Buffer

__all__ = ["Codec"]


class Codec(ABC):
    """Stateless; one instance serves every call and every thread. What it writes, every later version of it reads."""

    name: ClassVar[str]
    """What the manifest calls it; lower-case letters, digits and ``-``."""

    @abstractmethod
    def compress(self, data: Buffer) -> bytes:
        """``data`` encoded. Never fails for want of compressibility: the result may be longer than ``data``."""

    @abstractmethod
    def decompress(self, data: Buffer, size: int) -> bytes:
        """The ``size`` bytes that ``data`` encodes. Raises ``FormatError`` where they are more, fewer or not decodable.

        ``data`` may be hostile: an implementation allocates no more than in proportion to ``size`` and ``len(data)``.
        """
