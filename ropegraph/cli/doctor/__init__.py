"""``python -m ropegraph doctor``."""
