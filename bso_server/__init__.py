"""Server of zeus-plugins, which records the cost of each run of a job and chooses the next batch size."""
