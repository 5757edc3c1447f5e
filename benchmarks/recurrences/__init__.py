"""Real recurring trainings, each recurrence a process: what policies cost against always the default size."""
