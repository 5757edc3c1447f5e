"""Simulated jobs: recurring trainings replayed from traces, through the server's own decisions."""
