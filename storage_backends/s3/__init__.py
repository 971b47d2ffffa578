"""Objects in S3 and in stores that speak its protocol."""

from __future__ import annotations
