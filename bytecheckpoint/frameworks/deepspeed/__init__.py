"""The adapters for DeepSpeed: engines at ZeRO 0 to 3, and the optimizers inside them.

Neither imports DeepSpeed. Both read the engine's own structures, without collectives.
"""
