"""Measurements behind the figures of the documentation: docs/benchmarks.md."""
