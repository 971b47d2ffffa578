"""This library's version, as stored in manifests and data files."""

__all__ = ["HEADER_METADATA", "VERSION"]

VERSION = "0.1.0"

# What safetensors files of checkpoints say of themselves; "pt" is what other tools look for.
HEADER_METADATA = {"format": "pt", "bytecheckpoint": VERSION}
