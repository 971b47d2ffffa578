"""Encode and decode the manifest: an envelope, which is the same in all versions, and its payload.

Nothing is used before the checksum of the whole document has been verified, and nothing is allocated because of a
number that the document's own size does not account for.
"""

from __future__ import annotations

import msgpack
import xxhash
import zstandard

from ...errors import CorruptionError, FormatError, UnsupportedVersionError
from .document import Manifest, Summary
from .payload import pack_payload, unpack_payload, unpack_summary
from .validation import validate, validate_summary

FORMAT_VERSION = 1
"""The version that this library reads and writes."""

MANIFEST_KEY = "manifest.msgpack"
"""The manifest's key, relative to the checkpoint."""

MAX_MANIFEST_BYTES = 4 << 30
"""The largest manifest, compressed or not."""

_MAGIC = "bytecheckpoint"
START = b"\x96\xae" + _MAGIC.encode()
"""The first bytes of every manifest: an array of six, then the magic string."""

MANIFEST_TRAILER = 16
"""Bytes of the checksum at the end of every manifest."""

_TRAILER = 2 + MANIFEST_TRAILER  # bytes: msgpack's header of a 16-byte bin, and the checksum
_FREE_EXPANSION = 1 << 20  # bytes; up to this size any compression ratio is harmless
_MAX_RATIO = 256

# zstd is not called through ``codecs``, which is a plug-in interface for data files in a higher layer. The two codecs
# of the envelope are part of the format.


def encode(manifest: Manifest, *, compress: bool = True) -> bytes:
    """Validate a manifest and return its bytes.

    Raises ``FormatError`` if it breaks a rule, so that no invalid manifest is ever committed. Equal manifests give
    equal bytes (with the same version of zstd, if compressed).
    """
    validate(manifest)
    payload = pack_payload(manifest)
    codec, stored = "raw", payload
    if compress:
        smaller = zstandard.ZstdCompressor(level=3, write_content_size=True).compress(payload)
        if len(smaller) < len(payload) <= max(_FREE_EXPANSION, _MAX_RATIO * len(smaller)):
            codec, stored = "zstd", smaller
    body = START + b"".join(msgpack.packb(part) for part in (FORMAT_VERSION, codec, len(payload), stored)) + b"\xc4\x10"
    data = body + xxhash.xxh3_128_digest(body)
    if max(len(data), len(payload)) > MAX_MANIFEST_BYTES:
        raise FormatError(f"manifest of {len(payload)} bytes is over {MAX_MANIFEST_BYTES}; use fewer shards")
    return data


def decode(data: bytes) -> Manifest:
    """Return the manifest that ``data`` encodes, validated.

    Raises ``CorruptionError`` if bytes are damaged or missing, ``UnsupportedVersionError`` for a version or codec that
    this library does not read, and ``FormatError`` for an intact document that breaks a rule.
    """
    manifest = unpack_payload(_payload(data))
    validate(manifest)
    return manifest


def decode_summary(data: bytes) -> Summary:
    """Return the summary of the manifest that ``data`` encodes. Only the summary is validated.

    Raises as ``decode``.
    """
    summary = unpack_summary(_payload(data))
    validate_summary(summary)
    return summary


def _payload(data: bytes) -> bytes:
    if not data.startswith(START[1:], 1):
        raise CorruptionError(
            f"not a manifest, or damaged at its start ({len(data)} bytes, first {data[:16].hex() or 'none'})"
        )
    if len(data) <= len(START) + _TRAILER or xxhash.xxh3_128_digest(data[:-16]) != data[-16:]:
        raise CorruptionError(
            f"checksum mismatch in the manifest ({len(data)} bytes): it was truncated or changed after it was written; "
            f"restore the file or load an earlier checkpoint"
        )
    return _expand(*_open_envelope(data))


def _open_envelope(data: bytes) -> tuple[str, int, bytes]:
    if len(data) > MAX_MANIFEST_BYTES:
        raise FormatError(f"manifest of {len(data)} bytes is over {MAX_MANIFEST_BYTES}")
    unpacker = msgpack.Unpacker(max_buffer_size=len(data), max_array_len=6, max_map_len=0, max_ext_len=0)
    unpacker.feed(data)
    try:
        unpacker.read_array_header()
        unpacker.skip()
        version = unpacker.unpack()
        if type(version) is int and version != FORMAT_VERSION:
            raise UnsupportedVersionError(
                f"checkpoint has format version {version}; this library reads version {FORMAT_VERSION}: use a newer "
                f"library"
            )
        codec, raw_length, stored, checksum = (unpacker.unpack() for _ in range(4))
    except (ValueError, msgpack.UnpackException) as error:
        raise FormatError(f"manifest envelope cannot be decoded: {error}") from None
    types = (type(version), type(codec), type(raw_length), type(stored), type(checksum))
    if rest := len(data) - unpacker.tell():  # word-ok: a method of msgpack
        raise FormatError(f"manifest: {rest} bytes follow the end")
    if data[0] != START[0] or types != (int, str, int, bytes, bytes) or len(checksum) != 16:
        raise FormatError("manifest envelope is not [magic, version, codec, raw length, payload, checksum]")
    return codec, raw_length, stored


def _expand(codec: str, raw_length: int, stored: bytes) -> bytes:
    if codec not in ("raw", "zstd"):
        raise UnsupportedVersionError(f"manifest has codec {codec!r:.40}; this library reads 'raw' and 'zstd'")
    if not 0 <= raw_length <= min(MAX_MANIFEST_BYTES, max(_FREE_EXPANSION, _MAX_RATIO * len(stored))):
        raise FormatError(f"manifest payload of {len(stored)} bytes claims to expand to {raw_length}; refused")
    if codec == "raw":
        payload = stored
    else:
        try:
            # zstandard allocates the size that the frame states, regardless of max_output_size: check it first.
            if zstandard.frame_content_size(stored) != raw_length:
                raise FormatError(f"the manifest's zstd frame does not state the expected {raw_length} bytes")
            payload = zstandard.ZstdDecompressor().decompress(
                stored, max_output_size=raw_length, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise FormatError(f"manifest payload is not a zstd frame: {error}") from None
    if len(payload) != raw_length:
        raise FormatError(f"the manifest's payload has {len(payload)} bytes, not the expected {raw_length}")
    return payload
