"""What bench_rope times of decoding into caches and of QKV packed by groups."""

from __future__ import annotations

import torch
from torch import Tensor

from ropegraph.ir.ops import CacheWrite, Rope, RopeBackward, RopePair
from tests.kernels.bench_rope import Row, build, copy_row, data, measure, pair, stream, table, timed
from tests.kernels.cases import Case, case

BF16 = torch.bfloat16
# Times the figure beside which a row stands: another launch of the same size; splitting, copying
# and rotating apart; a copy of as many bytes.
AS_LAUNCH, AS_SPLIT, AS_COPY = 1.25, 0.6, 1.05


def fused() -> list[Row]:
    return [*decoding(64, 1), *decoding(64, 4), *packed_by_groups(2, 8192)]


def decoding(b: int, s: int, s_max: int = 2048) -> list[Row]:
    """Q and K turned, K and V into caches: one launch, beside Q and K alone and torch's writes."""
    q, k, v = (data(b, s, h, 128, "bshd") for h in (32, 8, 8))
    caches = [data(b, s_max, 8, 128, order) for order in ("bshd", "bhsd")]
    rows = torch.arange(b, device="cuda", dtype=torch.int32) * (s_max // (2 * b))
    name = f"b{b} s{s}, caches of {s_max} rows"
    alone = measure(f"rope Q+K alone; {name}", pair(q, k, Rope(128, 0)))
    found = [alone]
    for order, room in zip(("bshd", "bhsd"), caches, strict=True):
        given = decode(q, k, v, room, torch.empty_like(room), rows)
        exe, env, handle = build(given), given.env, stream()
        us = timed(lambda exe=exe, env=env, handle=handle: exe(env, handle))
        check(given)
        moved = 2 * sum(x.numel() * x.element_size() for x in (q, k, v))
        limit = AS_LAUNCH * alone.us
        found.append(
            Row(f"rope Q+K, K and V into {order} caches; {name}", us, moved / us / 1e6, limit)
        )
    found.append(
        by_torch(f"rope Q+K, then K and V into caches by torch; {name}", q, k, v, caches, rows)
    )
    return found


def decode(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor) -> Case:
    freqs = table(k_cache.shape[2], 128)
    turn = {"freqs": freqs, "start_positions": rows}
    tensors = {"input0": q, **{f"{p}0": t for p, t in turn.items()}, "output0": torch.empty_like(q)}
    tensors |= {"input1": k, **{f"{p}1": t for p, t in turn.items()}}
    for i, room in ((1, k_cache), (2, v_cache)):
        tensors |= {f"cache{i}": room, f"cache_positions{i}": rows, f"output{i}": room}
    tensors["input2"] = v
    parts = Rope(128, 0, 0.088), Rope(128, 0), CacheWrite()
    return case(RopePair(parts, ("q", "k", "v")), **tensors)


def check(given: Case) -> None:
    """V lies where it should, to the bit; tests/gpu checks the rest."""
    rows, v, room = given.at("cache_positions2"), given.at("input2"), given.at("output2")
    for b, row in enumerate(rows.tolist()):
        assert torch.equal(room[b, :, row : row + v.shape[2]], v[b]), b


def by_torch(
    work: str, q: Tensor, k: Tensor, v: Tensor, caches: list[Tensor], rows: Tensor
) -> Row:  # fmt: skip
    """The rotation by this kernel, then K and V into the caches by torch."""
    given = pair(q, k, Rope(128, 0))
    exe, env, handle = build(given), given.env, stream()
    k_rot = given.at("output1")
    entry = torch.arange(len(rows), device="cuda")[:, None]
    index = rows.long()[:, None] + torch.arange(k.shape[2], device="cuda")

    def run() -> None:
        exe(env, handle)
        for room, x in zip(caches, (k_rot, v), strict=True):
            room[entry, :, index] = x.transpose(1, 2)

    us = timed(run)
    moved = 2 * sum(x.numel() * x.element_size() for x in (q, k, k, v))
    return Row(work, us, moved / us / 1e6)


def packed_by_groups(b: int, s: int, groups: int = 8, n: int = 4, d: int = 128) -> list[Row]:
    """TransformerEngine's layout [b, s, groups, (n + 2) d], beside copies of the same tensor."""
    whole = torch.randn(b, s, groups, (n + 2) * d, device="cuda", dtype=BF16)
    heads = whole.unflatten(3, (n + 2, d))
    q, k, v = heads[:, :, :, :n], heads[:, :, :, n], heads[:, :, :, n + 1]
    name = f"by groups, b{b} s{s} g{groups} n{n}"
    flat = [
        torch.empty(b, s, h, d, device="cuda", dtype=BF16) for h in (groups * n, groups, groups)
    ]
    shares = [q.reshape(b, s, groups * n, d).contiguous(), k.contiguous()]
    copy = copy_row(f"one copy of the bytes of Q and K; {name}", torch.cat(shares, 2))
    del shares

    def split() -> None:
        for to, part in zip(flat, (q, k, v), strict=True):
            to.view(part.shape).copy_(part)

    flat_q, flat_k = (x.transpose(1, 2) for x in flat[:2])
    after = pair(flat_q, flat_k, Rope(d, 0), in_place=True)
    exe, env, handle = build(after), after.env, stream()

    def split_and_turn() -> None:
        split()
        exe(env, handle)

    whole_bytes = 2 * whole.numel() * whole.element_size()
    apart_us, split_us = timed(split_and_turn), timed(split)
    five = (q.permute(0, 2, 3, 1, 4), k.transpose(1, 2))
    place = case(RopePair((Rope(d, 0), Rope(d, 0))), **ends(five, five))
    forward = Rope(d, 0, head_groups=groups), Rope(d, 0)
    backward = RopeBackward(d, 0, head_groups=groups), RopeBackward(d, 0)
    out = case(RopePair(forward), **ends(five, (flat_q, flat_k)))
    back = case(RopePair(backward), **ends((flat_q, flat_k), five, "dY", "dX"))
    limit = AS_COPY * copy.us
    return [
        copy,
        Row(f"split and copied by torch; {name}", split_us, whole_bytes / split_us / 1e6),
        Row(
            f"split and copied by torch, then turned; {name}",
            apart_us,
            whole_bytes / apart_us / 1e6,
        ),
        measure(f"qkv_rope in place; {name}", place, min(limit, AS_SPLIT * apart_us)),
        measure(f"qkv_rope to Q and K; {name}", out, limit),
        measure(f"qkv_rope backward into dQKV; {name}", back, limit),
    ]


def ends(
    read: tuple[Tensor, Tensor], written: tuple[Tensor, Tensor], x: str = "input", y: str = "output"
) -> dict[str, Tensor]:  # fmt: skip
    found: dict[str, Tensor] = {}
    freqs = table(read[1].shape[2], read[1].shape[3])
    for i, (source, target) in enumerate(zip(read, written, strict=True)):
        found |= {f"{x}{i}": source, f"freqs{i}": freqs, f"{y}{i}": target}
    return found
