"""Benchmarks: ``python -m benchmarks.NAME --profile quick|full --json FILE``."""
