"""This library's version, as stored in manifests."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
