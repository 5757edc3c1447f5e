"""What a policy would have done: recurring trainings replayed from traces, through the server's own decisions."""
