"""Files below a directory of this machine."""

from __future__ import annotations
