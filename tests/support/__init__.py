"""Helpers shared by several test files."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Folder of the repository."""
