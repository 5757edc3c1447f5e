"""The GPU of a driver that is not there, which `path` holds for processes that have it on their path."""

NAME = "Simulated GPU"
POWER_W = 317.0
MAX_POWER_W = 650.0
PERIOD_S = 0.02
