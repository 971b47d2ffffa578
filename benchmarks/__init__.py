"""Speed, as ratios to what the machine can do, measured in the same run. ``python -m benchmarks.run --help``."""
