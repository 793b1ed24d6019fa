"""``python -m ropegraph bench``: ratios to what a user would otherwise write, from one run."""
