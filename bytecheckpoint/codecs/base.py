"""The codec interface: compress a part of a file, and decompress it within a bound."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from typing_extensions import Buffer

__all__ = ["Codec"]


class Codec(ABC):
    """Compress and decompress bytes.

    A codec is stateless: one instance serves every call and every thread. A later version of a codec must read what an
    earlier version has written.
    """

    name: ClassVar[str]
    """The codec's name in the manifest: lower-case letters, digits and ``-``."""

    @abstractmethod
    def compress(self, data: Buffer) -> bytes:
        """Encode bytes.

        Args:
            data: Any contiguous buffer.

        Returns:
            The encoded bytes, which may be longer than ``data``.
        """

    @abstractmethod
    def decompress(self, data: Buffer, size: int) -> bytes:
        """Decode bytes.

        ``data`` may be hostile: an implementation must not allocate more than in proportion to ``size`` and
        ``len(data)``.

        Args:
            data: What ``compress`` has returned.
            size: The exact number of decoded bytes.

        Returns:
            The ``size`` decoded bytes.

        Raises:
            FormatError: ``data`` cannot be decoded, or decodes to another number of bytes.
        """
