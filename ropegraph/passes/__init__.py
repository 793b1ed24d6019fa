"""Rewrites: Graph -> Graph, one a file."""
