"""Observation of a server: metrics for Prometheus, ids of requests, and logs."""
