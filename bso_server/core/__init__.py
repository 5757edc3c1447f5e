"""The decisions, pure: no clock, no I/O, no global random state. Frozen dataclasses in, values out."""
