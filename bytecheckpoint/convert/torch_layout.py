"""Lay out what ``torch.save`` writes before any tensor is read, and stream the tensors' bytes into it.

``torch.save`` writes a zip archive without compression. The local header of an entry has no CRC-32: it follows the
data, and is repeated in the central directory at the end of the archive. So an archive can be written from its
beginning to its end, while the tensors are read one piece after another.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.serialization import skip_data

from ..engine.tensor_bytes import byte_view
from ..errors import FormatError
from ..frameworks.tree_paths import replace_all
from ..storage_backends.base import ObjectWriter
from .rewriter import OutputTensor, Progress
from .state_dicts import StoredTensorRef

# The records of a zip archive (APPNOTE.TXT, section 4.3).
_DESCRIPTOR = b"PK\x07\x08"  # the CRC-32 follows it
_ENTRY, _ENTRY_CRC, _ENTRY_BYTES = b"PK\x01\x02", 16, 46
_LOCATOR = b"PK\x06\x07"
_END_BYTES, _LOCATOR_BYTES = 22, 20


@dataclass(frozen=True)
class TorchLayout:
    """An archive of ``torch.save`` without the bytes of its tensors.

    Attributes:
        runs: The bytes around the tensors: before the first, between them, and after the last.
        tensors: What is stored between the runs, without empty tensors.
        size: Bytes of the whole archive.
    """

    runs: tuple[bytes, ...]
    tensors: tuple[OutputTensor, ...]
    size: int

    @classmethod
    def of(cls, tree: Any, output: Callable[[int], OutputTensor]) -> TorchLayout:
        """Lay out a tree with ``StoredTensorRef``s. One row at several places is one tensor.

        Args:
            tree: What to store.
            output: Maps a row to what is stored of it.

        Returns:
            The layout.

        Raises:
            FormatError: This version of torch writes another layout.
        """
        outputs: dict[int, OutputTensor] = {}
        stand_ins: dict[int, torch.Tensor] = {}

        def stand_in(found: StoredTensorRef) -> torch.Tensor:
            if found.row not in stand_ins:
                one = outputs[found.row] = output(found.row)
                with FakeTensorMode():
                    stand_ins[found.row] = torch.empty(one.box.lengths, dtype=one.torch_dtype)
            return stand_ins[found.row]

        file = _SparseFile()
        with skip_data(materialize_fake_tensors=True):
            torch.save(replace_all(tree, StoredTensorRef, stand_in), file)  # type: ignore[arg-type] # what it uses
        tensors = tuple(one for one in outputs.values() if one.nbytes)
        if file.gaps != [one.nbytes for one in tensors] or any(not r.startswith(_DESCRIPTOR) for r in file.runs[1:]):
            raise FormatError(f"torch.save of torch {torch.__version__} writes an unknown layout; report this")
        return cls(tuple(map(bytes, file.runs)), tensors, file.at)

    def write(self, writer: ObjectWriter, offset: int, pieces: Iterator[torch.Tensor], progress: Progress) -> None:
        """Write the archive from byte ``offset`` of an object on.

        Args:
            writer: Writes the object.
            offset: Where the archive begins.
            pieces: The bytes of ``tensors``, in their order. No piece contains two of them.
            progress: Called with the number of bytes of tensors written since the last call.

        Raises:
            CorruptionError: Stored bytes are damaged or missing.
            StorageError: A store failed.
        """
        run, crcs = self.runs[0], list[int]()
        for tensor, following in zip(self.tensors, self.runs[1:], strict=True):
            writer.write(offset, run)
            offset += len(run)
            crc, end = 0, offset + tensor.nbytes
            while offset < end:
                data = byte_view(next(pieces))
                writer.write(offset, data)
                crc = zlib.crc32(data, crc)
                offset += len(data)
                progress(len(data))
            crcs.append(crc)
            run = _DESCRIPTOR + crc.to_bytes(4, "little") + following[8:]
        writer.write(offset, _with_entries(run, self.size, crcs))


class _SparseFile:
    """Records what ``torch.save`` writes, and the gaps that it leaves for the tensors."""

    def __init__(self) -> None:
        self.runs: list[bytearray] = [bytearray()]
        self.gaps: list[int] = []
        self.at = 0

    def write(self, data: bytes) -> int:
        self.runs[-1] += data
        self.at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        skipped = offset - self.at if whence == 0 else offset
        if skipped:
            self.gaps.append(skipped)
            self.runs.append(bytearray())
            self.at += skipped
        return self.at

    def flush(self) -> None:
        """There is nothing to flush."""


def _with_entries(last: bytes, size: int, crcs: Sequence[int]) -> bytes:
    """Fill the CRC-32s into the central directory, which is in the last run of an archive of ``size`` bytes.

    The entries of the tensors are those of data without a CRC-32, in the order of the tensors.
    """
    (start,) = struct.unpack_from("<I", last, len(last) - _END_BYTES + 16)
    locator = len(last) - _END_BYTES - _LOCATOR_BYTES
    if start == 0xFFFFFFFF and last.startswith(_LOCATOR, locator):
        (end64,) = struct.unpack_from("<Q", last, locator + 8)
        (start,) = struct.unpack_from("<Q", last, end64 - (size - len(last)) + 48)
    found, at, left = bytearray(last), start - (size - len(last)), iter(crcs)
    while crcs and found.startswith(_ENTRY, at):
        crc, nbytes = struct.unpack_from("<I4xI", found, at + _ENTRY_CRC)
        if not crc and nbytes:
            found[at + _ENTRY_CRC : at + _ENTRY_CRC + 4] = next(left).to_bytes(4, "little")
        at += _ENTRY_BYTES + sum(struct.unpack_from("<HHH", found, at + 28))
    return bytes(found)
