"""A training as the optimizer sees it: one trial, its measurements, and the changes to a trainer."""
