"""The server of zeus-plugins: it remembers what every run of a job cost and chooses the next batch size."""
