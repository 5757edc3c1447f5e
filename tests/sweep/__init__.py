"""Many combinations of data, strategy, accumulation and schedule, each trained for real and counted by other means.

`python -m tests.sweep` prints their table; `test_sweep.py` finds no combination that trains at another size in silence.
"""
