"""Measurements behind the figures of the documentation: CONTRIBUTING.md."""
