"""Plain values as bytes: a strict, deterministic msgpack encoding that no reader can be made to run code by.

A value comes back with the type it had: a tuple as a tuple, a numpy scalar as that scalar, NaN with its bits. What
msgpack has no type for travels as an extension (``types.Ext``; the tags are part of the format). Whatever is not listed
there is refused by name, or stored as a pickle where the caller asks for it on both sides.
"""

from __future__ import annotations

from .decoding import decode_value
from .encoding import encode_value
from .files import decode_path, decode_values_file, encode_path, encode_values_file, value_digest
from .types import MAX_DEPTH, Container, Path, path_name

__all__ = [
    "MAX_DEPTH",
    "Container",
    "Path",
    "decode_path",
    "decode_value",
    "decode_values_file",
    "encode_path",
    "encode_value",
    "encode_values_file",
    "path_name",
    "value_digest",
]
