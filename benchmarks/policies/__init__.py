"""Research on policies in simulated jobs; ``python -m benchmarks.policies --help``, docs/policy-figures.md."""
