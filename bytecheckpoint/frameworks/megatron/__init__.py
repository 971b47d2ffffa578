"""The adapters for Megatron-core: its models in any parallel layout, and its optimizers.

Megatron is never imported. The model describes its own shards (``sharded_state_dict``), from which each parameter gets
a layout in global boxes under one form of names: per layer and per expert. The optimizers' shards are ranges of these
parameters, so the same layouts describe them.
"""

from __future__ import annotations
