"""Benchmark of real recurring trainings, one process per run: costs of policies and of the default size."""
