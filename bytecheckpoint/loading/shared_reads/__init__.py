"""Read bytes that several ranks request once, and exchange them between ranks."""

from __future__ import annotations
