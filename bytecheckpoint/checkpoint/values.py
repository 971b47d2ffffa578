"""Read the plain values of a checkpoint. Nothing in them is executed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..engine.reading.stored_files import read_stored_file
from ..errors import StateError
from ..format.manifest.document import Manifest
from ..format.manifest.files import COMPANION
from ..format.values.decoding import decode_value
from ..format.values.files import decode_values_file
from ..format.values.types import MAPPINGS, Container, is_left_out, path_name, unread_in
from ..frameworks.tree_paths import PathIndex, build_tree
from ..runtime.messages import listed
from ..storage_backends.base import StorageBackend
from ..tensors.shards import Path


class StoredValue(NamedTuple):
    """One plain value. ``rank`` is None if all ranks share it. Equal values have equal ``encoded`` bytes."""

    section: str
    path: Path
    rank: int | None
    encoded: bytes

    @property
    def name(self) -> str:
        """The value's full name, with ``@rank`` if one rank owns it."""
        owner = "" if self.rank is None else f"@{self.rank}"
        return f"{self.section}.{path_name(self.path)}{owner}"

    @property
    def only_orders_keys(self) -> bool:
        """Whether this is no value, but the kind of a mapping and the order of its keys."""
        decoded = self.decode()
        return type(decoded) is Container and decoded.kind in MAPPINGS

    def decode(self) -> Any:
        """Return the value, or a note in place of a pickle, which is never loaded here."""
        try:
            return decode_value(self.encoded, where=self.name)
        except StateError:
            return f"<a pickle of {len(self.encoded)} bytes, not loaded>"


def unread_values(values: Iterable[StoredValue]) -> dict[str, str]:
    """Return what the values are that this library does not read, by full name: those of another system."""
    return {value.name: found.what for value in values if (found := unread_in(value.decode()))}


def refuse_unread(values: Iterable[StoredValue], url: str) -> None:
    """Raise ``StateError`` for values that this library does not read, before anything is written without them."""
    unread = unread_values(values)
    if unread:
        values_and_kinds = listed([f"{name} ({what})" for name, what in unread.items()])
        raise StateError(f"{url}: this library does not read {values_and_kinds}; nothing was written; exclude them")


def stored_values(
    backend: StorageBackend, manifest: Manifest, *, section: str | None = None, ranks: Collection[int] | None = None
) -> Iterator[StoredValue]:
    """Yield all values, or those of one section, in the order of files and entries. Reads each file once.

    Of the values that single ranks own, only those of ``ranks`` if that is given. Raises ``CorruptionError`` and
    ``FormatError``.
    """
    files = manifest.files
    for row, kind in enumerate(files.kind):
        owner, of_section = int(files.rank[row]), manifest.section_name(int(files.section[row]))
        if kind in ("tensors", COMPANION) or section not in (None, of_section):
            continue
        if kind == "rank_values" and ranks is not None and owner not in ranks:
            continue
        document = read_stored_file(backend, manifest, row, head_only=False)
        for path, is_shared, encoded in decode_values_file(document):
            yield StoredValue(of_section, path, None if is_shared else owner, encoded)


def decoded_values(values: Iterable[StoredValue], decode: Callable[[StoredValue], Any]) -> dict[Path, Any]:
    """Return what ``decode`` makes of the values of a section, by path, without what was left out of the save.

    A rank's own value takes precedence over a shared one.
    """
    shared_first = sorted(values, key=lambda value: value.rank is not None)
    decoded = {value.path: decode(value) for value in shared_first}
    return {path: value for path, value in decoded.items() if not is_left_out(value)}


def section_tree(section: str, values: Mapping[Path, Any], tensors: Mapping[str, Any]) -> Any:
    """Build the tree of a section from its decoded values, and its tensors by name. Raises ``MismatchError``."""
    if set(values) == {()} and not tensors and not isinstance(values[()], Container):
        return values[()]
    index = PathIndex.of(values)
    leaves = [(path, value) for path, value in values.items() if type(value) is not Container]
    leaves += [(index.path_of(fqn), tensor) for fqn, tensor in tensors.items()]
    return build_tree(leaves, index.containers, (), section)
