"""TransformerEngine's rotation as its documentation has it, in fp64: the tests' own words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@contextmanager
def dirty_memory() -> Iterator[None]:
    """What torch allocates holds NaN until it is written."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty_strided((2,), (3,)).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(rows: int, width: int, seed: int = 7) -> Tensor:
    """Angles of which no two columns are alike: each channel must read its own."""
    return 3 * normal(rows, 1, 1, width, seed=seed, dtype=F32)


def turned(x: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """x [.., d] by angles [.., d2]: x_i cos_i + rot(x)_i sin_i, the rest as it is."""
    d2 = angles.shape[-1]
    head, rest = x[..., :d2], x[..., d2:]
    if interleaved:
        rot = torch.stack((-head[..., 1::2], head[..., 0::2]), dim=-1).flatten(-2)
    else:
        rot = torch.cat((-head[..., d2 // 2 :], head[..., : d2 // 2]), dim=-1)
    angles = angles.to(x.dtype)
    return torch.cat((head * angles.cos() + rot * angles.sin(), rest), dim=-1)


def own_positions(length: int, cp_size: int, cp_rank: int) -> list[int]:
    """Of a whole sequence, what a rank holds: chunks r and 2 C - 1 - r of 2 C."""
    size = length // (2 * cp_size)
    chunks = [list(range(i * size, i * size + size)) for i in range(2 * cp_size)]
    if cp_size == 1:
        return list(range(length))
    return chunks[cp_rank] + chunks[2 * cp_size - 1 - cp_rank]


def rope(
    t: Tensor,
    freqs: Tensor,
    layout: str = "sbhd",
    starts: Iterable[int] | None = None,
    interleaved: bool = False,
    cu_seqlens: list[int] | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Row by row; rows of no sequence are zero."""
    rows = freqs[:, 0, 0]
    if layout == "thd":
        assert cu_seqlens is not None
        out = 0 * t
        first = list(starts) if starts is not None else [0] * (len(cu_seqlens) - 1)
        for i, (begin, end) in enumerate(pairwise(cu_seqlens)):
            at = begin // cp_size
            for j, p in enumerate(own_positions(end - begin, cp_size, cp_rank)):
                out[at + j] = turned(t[at + j], rows[p + first[i]], interleaved)
        return out
    x = t.transpose(0, 1) if layout == "sbhd" else t
    b, s = x.shape[:2]
    first = list(starts) if starts is not None else [0] * b
    own = own_positions(s * cp_size, cp_size, cp_rank)
    out = torch.stack(
        [turned(x[i], rows[[p + first[i] for p in own]][:, None], interleaved) for i in range(b)]
    )
    return out.transpose(0, 1) if layout == "sbhd" else out


def strange_grad(y: Tensor, seed: int = 5) -> list[Tensor]:
    """Gradients of y's shape in strange memory: expanded, permuted, a slice."""
    expanded = normal(*(1, *y.shape[1:]), seed=seed, dtype=y.dtype).expand(y.shape)
    backwards = normal(*reversed(y.shape), seed=seed, dtype=y.dtype).permute(
        *reversed(range(y.dim()))
    )
    wide = normal(*(*y.shape[:-1], 3 * y.shape[-1]), seed=seed, dtype=y.dtype)
    return [expanded, backwards, wide[..., 1::3]]
