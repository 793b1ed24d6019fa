"""``python -m ropegraph verify``."""
