"""The GPU's rows, by groups: bf16, beside a copy of as many bytes and what else is installed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable

import torch

from ropegraph.cli.bench import (
    attention,
    autograd,
    decode,
    host,
    mla,
    norm,
    positions,
    qkv,
    rotation,
)
from ropegraph.cli.bench.row import Row


def _training() -> list[Row]:
    return [host.training_step(1, 512), *autograd.rows()]


# Those with torch.compile come last: it leaves worker processes behind, which take their share of
# the host.
GROUPS: dict[str, Callable[[], list[Row]]] = {
    "host": host.rows,
    "positions": positions.rows,
    "qkv": qkv.rows,
    "mla": mla.rows,
    "norm": norm.rows,
    "decode": decode.rows,
    "rotation": rotation.rows,
    "attention": attention.rows,
    "training": _training,
}


def rows(names: Iterable[str]) -> list[Row]:
    """Measure these groups.  Raises AssertionError if a result is wrong."""
    found: list[Row] = []
    for name in names:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        torch.manual_seed(0)
        found += GROUPS[name]()
        gc.collect()  # graphs and their buffers refer to each other
        torch.cuda.empty_cache()
    return found
