"""The control plane: exchanges between the ranks of a job, and reports of each other's failures."""

from __future__ import annotations
