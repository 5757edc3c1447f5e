"""Observation of a server: metrics for Prometheus, ids of requests, logs and traces."""
