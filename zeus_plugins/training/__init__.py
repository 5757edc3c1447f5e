"""One training as the optimizer sees it: its trial, its measurements, and the changes to its trainer."""
