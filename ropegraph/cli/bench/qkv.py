"""qkv_rope on QKV packed by groups, as TransformerEngine packs it: forward, in place, backward."""

from __future__ import annotations

import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.cli.bench.rotation import in_place, rotation
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.timing import Call
from ropegraph.cli.bench.work import Handles, Work, beside_copy, ratio
from ropegraph.cli.bench.workload import (
    BF16,
    H_KV,
    H_Q,
    D,
    half_angles,
    heads,
    separate_heads,
    strides,
)

GROUPS, N = H_KV, H_Q // H_KV
AS_SPLIT = 0.6


def packed(b: int, s: int, device: str) -> Tensor:
    """[b, s, groups, (n + 2) D]."""
    return torch.randn(b, s, GROUPS, (N + 2) * D, device=device, dtype=BF16)


def parts(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of it: Q [b, groups, n, s, D], K and V [b, groups, s, D]."""
    each = qkv.view(*qkv.shape[:2], GROUPS, N + 2, D).permute(0, 2, 3, 1, 4)
    return each[:, :, :N], each[:, :, N], each[:, :, N + 1]


def forward(b: int, s: int, *, place: bool = False, device: str = "cuda") -> Work:
    """Q and K as tensors of their own, or turned where they are."""

    def record(g: rg.pygraph, t: Handles) -> None:
        split = [N * D, D, D]
        q, k, _ = g.qkv_rope(
            t["qkv"], t["freqs"], split=split, by_groups=True, half_width=True, in_place=place
        )
        if not place:
            for n, x in (("q", q), ("k", k)):
                x.set_output(True).set_name(f"{n}_rot").set_stride(strides(x.get_dim()))

    qkv = packed(b, s, device)
    _, _, v = parts(qkv)
    return Work(
        "qkv_rope in place" if place else "qkv_rope",
        {"qkv": qkv, "freqs": half_angles(s, device)},
        record,
        changed=("qkv",) if place else (),
        idle_bytes=v.numel() * v.element_size() * (2 if place else 1),
    )


def backward(b: int, s: int, device: str = "cuda") -> Work:
    """dQ and dK of Q and K into the packed gradient, where dV comes from attention itself."""
    dq, dk, _ = parts(packed(b, s, device))
    results = {"dq": dq, "dk": dk}

    def record(g: rg.pygraph, t: Handles) -> None:
        for n, groups in (("dq", GROUPS), ("dk", 0)):
            given = t[f"{n}_rot"], t["freqs"]
            made = g.rope_backward(*given, half_width=True, head_groups=groups)
            made.set_output(True).set_name(n).set_stride(results[n].stride())

    inputs = {
        "dq_rot": heads((b, H_Q, s, D), device=device),
        "dk_rot": heads((b, H_KV, s, D), device=device),
        "freqs": half_angles(s, device),
    }
    return Work("qkv_rope backward", inputs, record, results=results)


def split_and_turn(b: int, s: int, device: str = "cuda") -> Call:
    """What one does without it: three copies by torch, then rope in place on Q and K."""
    qkv = packed(b, s, device)
    flat = separate_heads(b, s, device)
    turn = in_place(rotation(flat, {"freqs": half_angles(s, device)}, half_width=True))

    def run() -> None:
        for to, part in zip(flat.values(), parts(qkv), strict=True):
            to.unflatten(1, part.shape[1:-2]).copy_(part)
        turn()

    return run


def rows(b: int = 2, s: int = 8192, device: str = "cuda") -> list[Row]:
    """Each form beside a copy, and in place beside splitting."""
    size = f"by groups, b{b} s{s}"
    place = forward(b, s, place=True, device=device)
    return [
        beside_copy(f"qkv_rope to Q and K, {size}", forward(b, s, device=device)),
        beside_copy(f"qkv_rope in place, {size}", place),
        beside_copy(f"qkv_rope backward into dQKV, {size}", backward(b, s, device)),
        ratio(
            f"qkv_rope in place, beside split, copied, then turned, {size}",
            {"ours": place, "split and turned": split_and_turn(b, s, device)},
            AS_SPLIT,
        ),
    ]
