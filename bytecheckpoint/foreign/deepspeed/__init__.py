"""Read checkpoints of DeepSpeed in place: ZeRO 0 to 3, and universal checkpoints."""
