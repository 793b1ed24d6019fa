"""The gradient of a table of angles, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropegraph.engines.torch_executor.angles import columns, compute_dtype, cos_sin
from ropegraph.engines.torch_executor.pairs import split_pairs
from ropegraph.engines.torch_executor.positions import Positions, Rows
from ropegraph.ir.ops import RopeFreqsGrad
from ropegraph.lowering.engine import Step


class FreqsGradStep:
    """dfreqs: each angle's gradient, summed over everything that reads it.

    d o1 / d t1 = -(x1 sin1 + x2 cos1), d o2 / d t2 = x1 cos2 - x2 sin2, times the scales.
    """

    def __init__(self, step: Step, attrs: RopeFreqsGrad) -> None:
        self.attrs, self.positions = attrs, Positions(step)
        self.x, self.dy, self.freqs, self.out = map(step.slot, ("input", "dY", "freqs", "dfreqs"))
        factor = attrs.output_scale * attrs.attention_factor
        self.factor = -factor if attrs.inverse else factor
        self._rows: Rows | None = None

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        attrs, out = self.attrs, env[self.out]
        x, dy = (t.flatten(1, 2) if t.dim() == 5 else t for t in (env[self.x], env[self.dy]))
        # Where nothing comes back nothing is asked of x: padding may hold NaN.
        x = x.masked_fill((dy == 0).all(-1, keepdim=True), 0)
        rows = self.positions(env)
        self._rows = rows
        dtype = compute_dtype(attrs, x)
        cos1, sin1, cos2, sin2 = cos_sin(attrs, [env[self.freqs]], rows, x.shape[2], dtype)
        if attrs.inverse:
            sin1, sin2 = -sin1, -sin2
        x1, x2 = (t.to(dtype) for t in split_pairs(x, attrs, attrs.interleaved))
        dy1, dy2 = (t.to(dtype) for t in split_pairs(dy, attrs, attrs.interleaved_output))
        grad1 = -dy1 * (x1 * sin1 + x2 * cos1)
        grad2 = dy2 * (x1 * cos2 - x2 * sin2)
        total = torch.zeros_like(out, dtype=dtype)
        for grad, table in zip((grad1, grad2), columns(attrs, total), strict=True):
            _add(grad.sum(1), table, rows)
        out.copy_(total * self.factor)

    def faults(self) -> tuple[str, ...]:
        """What the last run noticed of positions; waits for the device."""
        return () if self._rows is None else self._rows.faults()


def _add(grad: Tensor, table: Tensor, rows: Rows | None) -> None:
    """Add gradients [b, s, r/2] to a table [s_max, 1 or b, 1, r/2] where each row was read."""
    (b, s, _), batches = grad.shape, table.shape[1]
    if rows is None:
        grad = grad if batches == b else grad.sum(0, keepdim=True)
        table[:s, :, 0].add_(grad.transpose(0, 1))
        return
    for mask, fill in ((rows.dead, 0.0), (rows.bad, torch.nan)):
        if mask is not None:
            grad = grad.masked_fill(mask[..., None], fill)
    index = rows.index.expand(b, s)
    for entry in range(batches):
        # One table for all, or one for each batch entry.
        own = slice(None) if batches == 1 else slice(entry, entry + 1)
        table[:, entry, 0].index_add_(0, index[own].reshape(-1), grad[own].flatten(0, 1))
