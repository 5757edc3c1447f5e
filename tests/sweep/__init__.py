"""Many combinations of data, strategy, accumulation and schedule, each trained for real and counted independently.

`python -m tests.sweep` prints their table; `test_sweep.py` asserts that no combination silently trains at another size.
"""
