"""Encode plain values as bytes: strict, deterministic msgpack that cannot make a reader run code.

A value is decoded with its original type: a tuple as a tuple, a numpy scalar as that scalar, NaN with its bits. Types
that msgpack lacks are extensions (``types.Ext``), whose tags are part of the format. Anything else is rejected by name,
or stored as a pickle if the caller of both save and load requests it.
"""

from __future__ import annotations

from .decoding import decode_value
from .encoding import encode_value
from .files import decode_path, decode_values_file, encode_path, encode_values_file, value_digest
from .types import (
    LEFT_OUT,
    MAPPINGS,
    MAX_DEPTH,
    Container,
    Path,
    UnreadObject,
    check_hashes,
    is_left_out,
    is_number,
    path_name,
    unread_in,
)

__all__ = [
    "LEFT_OUT",
    "MAPPINGS",
    "MAX_DEPTH",
    "Container",
    "Path",
    "UnreadObject",
    "check_hashes",
    "decode_path",
    "decode_value",
    "decode_values_file",
    "encode_path",
    "encode_value",
    "encode_values_file",
    "is_left_out",
    "is_number",
    "path_name",
    "unread_in",
    "value_digest",
]
