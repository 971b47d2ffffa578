"""Convert checkpoints: export, import, reshard, copy and compare, in bounded memory."""

from __future__ import annotations
