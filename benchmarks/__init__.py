"""Measure speed as a ratio to what the machine can do, within one run. See ``python -m benchmarks.run --help``."""
