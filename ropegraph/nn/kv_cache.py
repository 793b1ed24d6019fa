"""The keys and values of one attention layer, for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from ropegraph.api.checks import as_count
from ropegraph.errors import GraphError


class KVCache:
    """Room for ``max_length`` rotated keys, and values, of each sequence of a batch.

    k, v: [batch, num_kv_heads, max_length, head_dim], written in place by a launch each step.
    lengths: [batch] int32 on the device, the rows that each sequence has: 0 at first. A sequence
    starts anew with ``lengths[i] = 0``.
    Nothing is read on the host and no shape changes, so a step can be compiled or captured.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {
            "batch": batch, "num_kv_heads": num_kv_heads, "max_length": max_length,
            "head_dim": head_dim,
        }  # fmt: skip
        dim = [as_count(n, f"KVCache: {name}", 1) for name, n in sizes.items()]
        # Zeros: a row that is not read yet must not be NaN, for engines weigh it by 0.
        with torch.inference_mode(mode=False):  # or they could be written in that mode alone
            self.k: Tensor = torch.zeros(dim, dtype=dtype, device=device)
            self.v: Tensor = torch.zeros(dim, dtype=dtype, device=device)
            self.lengths: Tensor = torch.zeros(batch, dtype=torch.int32, device=device)

    @property
    def max_length(self) -> int:
        """The rows there is room for."""
        return self.k.shape[2]

    def advance(self, new_rows: int | Tensor) -> None:
        """Count rows that were written: a number for all sequences, or [batch].

        Where they did not fit, which a CUDA device cannot say, ``lengths`` is more than max_length.
        """
        if not isinstance(new_rows, (int, Tensor)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(
                f"KVCache: new_rows={new_rows!r:.60}; use a number, or a tensor [batch]"
            )
        self.lengths.add_(new_rows)

    def reset(self) -> None:
        """Forget every sequence."""
        self.lengths.zero_()

    def __repr__(self) -> str:
        return f"KVCache(k and v {list(self.k.shape)}, {self.k.dtype}, {self.k.device})"
