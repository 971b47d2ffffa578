"""Objects in GCS and Azure, through obstore."""

from __future__ import annotations
