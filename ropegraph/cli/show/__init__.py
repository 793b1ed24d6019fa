"""``python -m ropegraph show``."""
