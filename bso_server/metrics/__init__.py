"""Watching a server: metrics for Prometheus, ids of requests, logs and traces.

`create_app` imports what needs ``prometheus_client``, and not before it is needed: a server in a training's process
never does, and whether several processes add up is read from the environment at that import.
"""
