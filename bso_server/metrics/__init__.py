"""Observation of a server: metrics for Prometheus, ids of requests, and logs."""

DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the directory in which processes share their counts; read when `prometheus` is imported."""
