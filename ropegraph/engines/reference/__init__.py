"""The fp64 engine: what every op means, written as plainly as torch allows."""

from ropegraph.engines.reference.engine import Reference

__all__ = ["Reference"]
