"""Inputs of mla_kv_rope in many layouts, and its formula in fp64."""

import torch
from torch import Tensor

from ropegraph.testing.inputs import Layout, placed

BF16, F32 = torch.bfloat16, torch.float32


def inputs(
    b: int, h: int, s: int, nope: int, v: int, r: int,
    dtype: torch.dtype = BF16, table: torch.dtype = F32, layout: Layout = "bshd", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    kv = torch.randn(b, h, s, nope + v, generator=g)
    k_rope = torch.randn(b, 1, s, r, generator=g)
    angle = torch.randn(s + 3, 1, 1, r, generator=g)
    return {
        "kv": placed(kv.to(dtype), layout),
        "k_rope": placed(k_rope.to(dtype), layout),
        # Two halves that differ, and more than a rotation: each column must be the right one.
        "cos": (1.5 * angle.cos()).to(table),
        "sin": (1.5 * angle.sin()).to(table),
    }


def edges(given: dict[str, Tensor], nope: int) -> dict[str, Tensor]:
    """The same with zero blocks, saturating and subnormal values, Inf and NaN in many places."""
    given = {port: t.clone() for port, t in given.items()}
    kv, k_rope = given["kv"], given["k_rope"]
    s, last = kv.shape[2], kv.shape[3] - 1
    kv[0, 0, 0] = 0.0
    kv[0, 0, 1] = -0.0
    kv[0, 0, :, 3] = 0.0
    kv[0, 0, 2, ::5] = torch.inf
    kv[0, 0, 3, ::7] = -torch.inf
    kv[0, -1, 4, ::3] = torch.nan
    kv[0, -1, 5] = torch.nan
    kv[0, -1, :, min(nope + 1, last)] = torch.nan
    kv[0, -1, 6] = 3.3895e38
    kv[0, -1, 7] = -3.0e38
    kv[0, -1, 8] *= 1e-38
    kv[0, -1, 9] = 9.2e-41
    kv[0, -1, 10, ::2] = -1e-40
    kv[0, -1, 11] = 448.0
    kv[0, -1, 12] = 449.0
    kv[0, -1, 13] *= 2.0**-126
    kv[0, -1, 14] *= 2.0**-118
    kv[0, -1, 15, ::4] *= 2.0**-12
    kv[0, -1, :, 2] = torch.linspace(-1, 1, s) * 1e-39
    k_rope[0, 0, 0] = 0.0
    k_rope[0, 0, 1, ::3] = torch.inf
    k_rope[0, 0, 2, ::4] = torch.nan
    k_rope[0, 0, 3] = 3e38
    k_rope[0, 0, 4] *= 1e-38
    k_rope[0, 0, 5] = 9.2e-41
    k_rope[0, 0, 6, ::2] = -0.0
    k_rope[0, 0, 7] *= 2.0**-110
    given["sin"][5:9] *= 2.0**-20
    given["cos"][8:12] *= 2.0**-30
    given["cos"][12] = 0.0
    given["sin"][13] = 0.0
    # Products far apart, the larger half way between two numbers: rounding twice would show.
    k_rope[0, 0, 14, 0::2], k_rope[0, 0, 14, 1::2] = 1.0078125, 1.0
    given["cos"][14], given["sin"][14] = 1.0078125 * 0.5 + 0.00390625, -(2.0**-60)
    k_rope[0, 0, 15, 0::2], k_rope[0, 0, 15, 1::2] = 1.5, 1.0
    given["cos"][15], given["sin"][15] = 1.0078125, 2.0**-70
    return given


def exact(given: dict[str, Tensor], nope: int) -> dict[str, Tensor]:
    """key and value in fp64."""
    kv, k_rope, cos, sin = (given[p].double() for p in ("kv", "k_rope", "cos", "sin"))
    s, half = kv.shape[2], k_rope.shape[3] // 2
    cos, sin = cos[:s, 0, 0], sin[:s, 0, 0]
    columns = []
    for i in range(half):
        x1, x2 = k_rope[:, 0, :, 2 * i], k_rope[:, 0, :, 2 * i + 1]
        columns.append(x1 * cos[:, i] - x2 * sin[:, i])
    for i in range(half):
        x1, x2 = k_rope[:, 0, :, 2 * i], k_rope[:, 0, :, 2 * i + 1]
        columns.append(x2 * cos[:, half + i] + x1 * sin[:, half + i])
    shared = torch.stack(columns, -1) if columns else k_rope[:, 0]
    heads = shared[:, None].expand(-1, kv.shape[1], -1, -1)
    return {"key": torch.cat([kv[..., :nope], heads], -1), "value": kv[..., nope:]}
