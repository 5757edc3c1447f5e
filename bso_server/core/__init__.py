"""Decisions as pure functions of frozen dataclasses: no clock, no I/O, no global random state."""
