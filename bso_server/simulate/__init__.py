"""Simulated jobs: recurring trainings, replayed from traces with the server's own policies."""
