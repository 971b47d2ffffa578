"""Read checkpoints of Megatron-core's ``dist_checkpointing`` (format ``torch_dist``) in place."""
