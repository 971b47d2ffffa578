"""Read folders of torch.distributed.checkpoint (DCP) in place.

``.metadata`` is a pickle that lists the tensors with their chunks, and for each chunk and each plain value a range of a
file. Such an item is an archive of ``torch.save`` by itself. See ``torch/distributed/checkpoint/metadata.py``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..checkpoint.index import Index
from ..errors import FormatError, KeyNotFoundError
from ..frameworks.tree_paths import with_lists
from ..tensors.dtypes import DType
from ..tensors.geometry import Box
from ..tensors.metadata import BasicMeta
from .archives.embedded import read_embedded
from .building import IndexBuilder, StoredBox, StoredLeaf
from .naming import OPTIMIZER_SECTION, sections_of, step_of
from .pickles.classes import explain, storage_dtype
from .pickles.interpreter import interpret
from .pickles.records import Global, Instance, Storage, TensorRef
from .source_path import SourcePath, read_all
from .torch_values import TorchValues

METADATA_KEY = ".metadata"
_MAX_METADATA_BYTES = 1 << 30
_RANK_OF_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_LIGHTNING = "meta.pt"
_NUMBERED_OPTIMIZER = re.compile(r"optimizer_\d{1,6}")
_HEADERS = "all_tensor_metadata"


def read_dcp(source: SourcePath) -> Index | None:
    """Return the index of a DCP folder; None if the path is none.

    Nested names become the tree that was saved: its first level is the sections, unless it is a state dict by itself.
    Raises ``FormatError`` and ``CorruptionError`` for damaged files.
    """
    if source.name or METADATA_KEY not in source.children:
        return None
    folder = DcpFolder(source)
    builder = IndexBuilder(source.backend, "torch.distributed.checkpoint")
    tree = folder.tree(builder)
    if _LIGHTNING in source.children:
        tree = _with_lightning(tree, TorchValues(builder).tree(*source.objects([_LIGHTNING])))
    for section, part in sections_of(tree).items():
        builder.add_tree(section, part)
    return builder.build(world_size=folder.world_size, step=step_of(tree))


def _with_lightning(tree: dict[str, Any], rest: Any) -> dict[str, Any]:
    """The tree with what Lightning stores of schedulers, loops and counters, and with one optimizer.

    Lightning numbers its optimizers, whose parameters have names. As in a save of a list of them, all are one section.
    """
    names = sorted((name for name in tree if _NUMBERED_OPTIMIZER.fullmatch(name)), key=lambda name: int(name[10:]))
    optimizers = [tree[name] for name in names]
    if optimizers and all(isinstance(one, dict) and "param_groups" in one for one in optimizers):
        tree = {name: value for name, value in tree.items() if name not in names}
        state = {fqn: entries for one in optimizers for fqn, entries in one.get("state", {}).items()}
        groups = [group for one in optimizers for group in one["param_groups"]]
        tree[OPTIMIZER_SECTION] = {"state": state, "param_groups": groups}
    return {**rest, **tree} if isinstance(rest, dict) else tree


class Item(NamedTuple):
    """A range of a file that holds one chunk of a tensor, or one plain value."""

    file: str
    offset: int
    length: int


class DcpFolder:
    """The decoded metadata of a folder.

    Attributes:
        tensors: Dtype and shape of each tensor.
        chunks: The boxes in which it is stored, with their items.
        values: The items of the plain values.
        paths: The path in the saved tree of each name; those of one component if it was not nested.
        world_size: The number of ranks that wrote files.
        kind: The class of the metadata.
    """

    def __init__(self, source: SourcePath) -> None:
        """Read ``.metadata``.

        Raises ``FormatError`` if it is no metadata of DCP, and ``KeyNotFoundError`` if it is missing.
        """
        self._backend, self._prefix = source.backend, source.prefix
        self._where = f"{source.backend.url}/{source.prefix}{METADATA_KEY}"
        found = source.backend.get(source.prefix + METADATA_KEY, max_size=_MAX_METADATA_BYTES)
        document = interpret(found, self._where)
        fields = self._fields(document, "Metadata", "state_dict_metadata", "storage_data")
        self.kind: Global = document.cls
        self.tensors: dict[str, BasicMeta] = {}
        self.chunks: dict[str, list[tuple[Box, Item]]] = {}
        self.values: dict[str, Item] = {}
        self._items = self._read_items(fields["storage_data"])
        self._headers = self._read_headers(fields.get(_HEADERS))
        self._read_entries(fields["state_dict_metadata"])
        self.paths = self._read_paths(fields.get("planner_data"))
        files = {item.file.removeprefix(self._prefix) for item in self._items.values()}
        ranks = [int(match[1]) for file in files if (match := _RANK_OF_FILE.fullmatch(file))]
        self.world_size = max(ranks, default=0) + 1

    def tree(self, builder: IndexBuilder) -> dict[str, Any]:
        """Return the saved tree with ``StoredLeaf``s, and its plain values, which are read."""
        tensors, objects = self.contents(builder)
        values = TorchValues(builder)
        leaves = {**tensors, **{name: values.tree(value) for name, value in objects.items()}}
        top: dict[Any, Any] = {}
        for name, leaf in leaves.items():
            *parents, key = self.paths.get(name, (name,))
            node = top
            for part in parents:
                node = node.setdefault(part, {})
                if type(node) is not dict:
                    raise FormatError(f"{self._where}: {name!r:.200} is stored below a value")
            node[key] = leaf
        return {key: with_lists(child) for key, child in top.items()}

    def contents(self, builder: IndexBuilder) -> tuple[dict[str, StoredLeaf], dict[str, Any]]:
        """Return the tensors, and the other objects as ``interpret`` returns them, by DCP's flat names."""
        found = self._read_objects()
        values, tensors = TorchValues(builder), {}
        for name, meta in self.tensors.items():
            pieces = [self._piece(values, name, meta, box, found[item], item) for box, item in self.chunks[name]]
            tensors[name] = StoredLeaf(meta, pieces)
        return tensors, {name: found[item] for name, item in self.values.items()}

    def _piece(self, values: TorchValues, name: str, meta: BasicMeta, box: Box, value: Any, item: Item) -> StoredBox:
        if type(value) is not TensorRef or value.shape != box.lengths or value.dtype != meta.dtype:
            found = f"{value.dtype} {list(value.shape)}" if type(value) is TensorRef else explain(value)
            raise FormatError(
                f"{self._backend.url}/{item.file}: at byte {item.offset} is {found}, but {METADATA_KEY} describes "
                f"{name!r:.200} {box} of {meta} there"
            )
        return values.leaf(value).boxes[0]._replace(box=box)

    # -------------------------------------------------------------------------------------------------------- metadata

    def _read_items(self, found: Any) -> dict[tuple[str, tuple[int, ...] | None], Item]:
        if type(found) is not dict:
            raise FormatError(f"{self._where}: storage_data is no dict")
        items = {}
        for key, info in found.items():
            index = self._fields(key, "MetadataIndex", "fqn")
            fields = self._fields(info, "_StorageInfo", "relative_path", "offset", "length")
            if fields.get("transform_descriptors"):
                raise FormatError(
                    f"{self._where}: {index['fqn']!r:.200} is stored with {fields['transform_descriptors']!r:.100}; "
                    f"load it with torch.distributed.checkpoint and save it without these extensions"
                )
            item = Item(fields["relative_path"], fields["offset"], fields["length"])
            is_plain = type(item.file) is str and type(item.offset) is int and type(item.length) is int
            if not is_plain or min(item.offset, item.length) < 0:
                raise FormatError(f"{self._where}: {index['fqn']!r:.200} is stored at {tuple(item)!r:.200}")
            if {"", ".", ".."} & {*item.file.split("/")}:
                raise FormatError(
                    f"{self._where}: {index['fqn']!r:.200} is stored in {item.file!r:.200}, not inside the folder"
                )
            items[index["fqn"], index.get("offset")] = item._replace(file=self._prefix + item.file)
        return items

    def _read_entries(self, found: Any) -> None:
        if type(found) is not dict or not all(type(name) is str for name in found):
            raise FormatError(f"{self._where}: state_dict_metadata is no dict of names")
        for name, entry in found.items():
            if type(entry) is Instance and entry.cls.name == "BytesStorageMetadata":
                self.values[name] = self._item(name, None)
                continue
            fields = self._fields(entry, "TensorStorageMetadata", "properties", "size", "chunks")
            meta = BasicMeta(self._dtype(name, fields["properties"]), self._numbers(name, fields["size"]))
            self.tensors[name] = meta
            self.chunks[name] = []
            for chunk in fields["chunks"]:
                part = self._fields(chunk, "ChunkStorageMetadata", "offsets", "sizes")
                offsets, sizes = self._numbers(name, part["offsets"]), self._numbers(name, part["sizes"])
                if 0 not in sizes or 0 in meta.shape:  # FSDP-2: a rank that holds nothing of a short tensor
                    self.chunks[name].append((Box(offsets, sizes), self._item(name, offsets)))

    def _item(self, name: str, offsets: tuple[int, ...] | None) -> Item:
        item = self._items.get((name, offsets)) or (self._items.get((name, None)) if offsets is not None else None)
        if item is None:
            raise FormatError(f"{self._where}: it does not state where {name!r:.200} at {offsets} is stored")
        return item

    def _dtype(self, name: str, properties: Any) -> DType:
        state = properties.state if type(properties) is Instance else None
        dtype = state[0] if type(state) is tuple and state else state.get("dtype") if type(state) is dict else None
        if type(dtype) is not DType:
            raise FormatError(f"{self._where}: {name!r:.200} has the dtype {dtype!r:.80}")
        return dtype

    def _numbers(self, name: str, found: Any) -> tuple[int, ...]:
        if type(found) is not tuple or not all(type(one) is int and 0 <= one < 1 << 62 for one in found):
            raise FormatError(f"{self._where}: {name!r:.200} has {found!r:.80} as a shape or an offset")
        return found

    def _read_paths(self, found: Any) -> Mapping[str, tuple[str | int, ...]]:
        if type(found) is not dict:
            return {}
        return {
            name: path
            for name, path in found.items()
            if type(path) is tuple and path and all(type(part) in (str, int) for part in path)
        }

    def _fields(self, found: Any, name: str, *required: str) -> Mapping[str, Any]:
        """The attributes of a dataclass. Raises ``FormatError`` for another object."""
        fields = found.attributes if type(found) is Instance and found.cls.name == name else {}
        if any(field not in fields for field in required):
            what = explain(found) if type(found) is Instance else f"a {type(found).__name__}"
            raise FormatError(f"{self._where}: it has {what} in place of {name}; is it metadata of DCP?")
        return fields

    # ----------------------------------------------------------------------------------------------------------- items

    def _read_headers(self, found: Any) -> dict[Item, bytes]:
        """The pickled headers of tensors that are stored as plain bytes, which ByteCheckpoint writes."""
        if type(found) is not dict:
            return {}
        headers = {}
        for key, header in found.items():
            index = self._fields(key, "MetadataIndex", "fqn")
            item = self._items.get((index["fqn"], index.get("offset")))
            if item is not None and type(header) is bytes:
                headers[item] = header
        return headers

    def _read_objects(self) -> dict[Item, Any]:
        items = {*self.values.values(), *(item for chunks in self.chunks.values() for _, item in chunks)}
        found = {item: self._plain_tensor(item, self._headers[item]) for item in items & self._headers.keys()}
        by_file: dict[str, list[Item]] = defaultdict(list)
        for item in items - self._headers.keys():
            by_file[item.file].append(item)
        read = read_all(lambda file: self._read_file(file, by_file[file]), by_file)
        for group, values in zip(by_file.values(), read, strict=True):
            found.update(zip(group, values, strict=True))
        return found

    def _plain_tensor(self, item: Item, header: bytes) -> Any:
        def storage(persistent_id: Any) -> Storage:
            is_storage = type(persistent_id) is tuple and len(persistent_id) == 5
            dtype = storage_dtype(persistent_id[1]) if is_storage else None
            if dtype is None:
                raise FormatError("it refers to something that is no storage")
            return Storage("", dtype, item.file, item.offset, item.length, None)

        where = f"{self._where}: the header of the tensor at byte {item.offset} of {item.file}"
        return interpret(header, where, storage)

    def _read_file(self, file: str, items: list[Item]) -> list[Any]:
        try:
            return read_embedded(self._backend, file, [item.offset for item in items], [item.length for item in items])
        except KeyNotFoundError as error:
            raise FormatError(
                f"{self._backend.url}/{file}: file is missing, but {METADATA_KEY} names it; fetch it again"
            ) from error
