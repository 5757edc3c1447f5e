"""A load generator for the batch size optimization server; ``python -m benchmarks --help``, docs/benchmarks.md."""
