"""Tensors as data: boxes and their algebra, dtypes, columnar tables, metadata, shards."""

from __future__ import annotations
