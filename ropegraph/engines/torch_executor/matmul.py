"""Products of matrices, by torch.matmul."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropegraph.ir.ops import Matmul
from ropegraph.lowering.engine import Step


class MatmulStep:
    """C = A B; a weight that all batch entries use meets them as one tall matrix."""

    def __init__(self, step: Step, attrs: Matmul) -> None:
        self.attrs = attrs
        self.a, self.b, self.c = map(step.slot, ("A", "B", "C"))

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        attrs, c = self.attrs, env[self.c]
        a = env[self.a].mT if attrs.transpose_A else env[self.a]
        b = env[self.b].mT if attrs.transpose_B else env[self.b]
        if attrs.sum_batch:
            # The sum over the batch is part of the sum over k: one product of wide matrices.
            wide = max(a.shape[0], b.shape[0])
            a, b = a.expand(wide, -1, -1), b.expand(wide, -1, -1)
            a, b = a.permute(1, 0, 2).flatten(1)[None], b.flatten(0, 1)[None]
        if b.shape[0] == 1:
            b = b[0]
        if c.is_contiguous():
            torch.matmul(a, b, out=c)
        else:
            c.copy_(torch.matmul(a, b))
