"""What bench_rope times of sources of angles and positions; each launch is checked before.

THD and context parallel by a table of angles are rows of `make bench`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ropegraph.engines.cuda_rope.job import parts_of
from ropegraph.engines.cuda_rope.kind import ports_of
from ropegraph.engines.cuda_rope.launch import DenseLaunch
from ropegraph.ir.ops import Rope, RopeBackward, RopePair
from tests.kernels.bench_rope import Row, build, copy_row, data, measure, stream, table
from tests.kernels.cases import Case, case, check
from tests.kernels.oracle import expected

BF16, F32 = torch.bfloat16, torch.float32
PAIRS = {"interleaved": True, "interleaved_output": True, "half_width": True}
AS_DENSE, AS_COPY = 1.03, 1.05  # times the figure beside which a row stands


def check_first_heads(given: Case) -> None:
    """Run it; the first head of each tensor against fp64, and no flag."""
    exe = build(given)
    exe(given.env, stream())
    torch.cuda.synchronize()
    data_ports = {p for attrs, suffix in parts_of(given.step) for p in ports_of(attrs, suffix)}
    ports = (*given.step.node.inputs, *given.step.node.outputs)
    tensors = {p: (t[:, :1] if p in data_ports else t).cpu() for p in ports for t in [given.at(p)]}
    attrs = given.step.node.attrs
    assert isinstance(attrs, RopePair)
    small = case(attrs, **tensors)
    check(small, expected(small), str(attrs.parts[0]))
    assert isinstance(exe, DenseLaunch)
    assert exe.faults() == (), attrs


def both(
    q: Tensor, k: Tensor, op: Rope | RopeBackward, **shared: Tensor
) -> Case:  # fmt: skip
    """Q and K in one launch, with the same tables and positions."""
    read, written = ("dY", "dX") if isinstance(op, RopeBackward) else ("input", "output")
    tensors: dict[str, Tensor] = {}
    for i, x in enumerate((q, k)):
        tensors |= {f"{read}{i}": x, f"{written}{i}": torch.empty_like(x)}
        tensors |= {f"{port}{i}": tensor for port, tensor in shared.items()}
    return case(RopePair((op, op)), **tensors)  # type: ignore[arg-type]


def checked(work: str, given: Case, target: float | None = None) -> Row:
    attrs = given.step.node.attrs
    assert isinstance(attrs, RopePair)
    # Those bits are the business of tests/gpu: the budget of fp32 is too small for hf.
    if attrs.parts[0].numerics != "hf":
        check_first_heads(given)
    return measure(work, given, target)


def angles_of(s: int, dtype: torch.dtype, width: int = 64) -> dict[str, dict[str, Tensor]]:
    freqs = table(s, 128)
    cos, sin = (t[..., :width].to(dtype).contiguous() for t in (freqs.cos(), freqs.sin()))
    return {"cos_sin": {"cos": cos, "sin": sin}, "packed": {"cos_sin": torch.cat([cos, sin], -1)}}


def sources() -> list[Row]:
    rows: list[Row] = []
    b, s = 2, 8192
    q, k = data(b, s, 32, 128, "bshd"), data(b, s, 8, 128, "bshd")
    rows.append(copy_row("copy Q, copy K", q, k))
    rows.append(copy := copy_row("one copy of as many bytes", torch.cat([q, k], 1)))
    half = Rope(128, 0, half_width=True)
    freqs = {"freqs": table(s, 128)[..., :64].contiguous()}
    rows.append(dense := checked("freqs", both(q, k, half, **freqs), AS_COPY * copy.us))
    of = {t: angles_of(s, t) for t in (BF16, F32)}
    full = angles_of(s, BF16, 128)
    made = {"inv_freq": 10000 ** (-torch.arange(64, device="cuda", dtype=F32) / 64)}
    exact = replace(half, angles="inv_freq", angle_precision="exact")
    plans: list[tuple[str, Rope, dict[str, Tensor]]] = [
        ("cos and sin, bf16", replace(half, angles="cos_sin"), of[BF16]["cos_sin"]),
        ("cos and sin, fp32", replace(half, angles="cos_sin"), of[F32]["cos_sin"]),
        ("packed cos and sin, bf16", replace(half, angles="packed"), of[BF16]["packed"]),
        (
            "full-width cos and sin, bf16",
            replace(half, angles="cos_sin", half_width=False, table_layout="full"),
            full["cos_sin"],
        ),
        ("inv_freq", replace(half, angles="inv_freq"), made),
        ("inv_freq, exact", exact, made),
        ("nemo", replace(half, angles="cos_sin", numerics="nemo"), of[F32]["cos_sin"]),
        ("hf", replace(half, angles="cos_sin", numerics="hf"), of[BF16]["cos_sin"]),
    ]
    for what, op, tensors in plans:
        row = checked(what, both(q, k, op, **tensors), AS_COPY * copy.us)
        rows.append(row)
        back = RopeBackward(**op.__dict__)
        rows.append(checked(f"{what}, backward", both(q, k, back, **tensors), AS_COPY * copy.us))
        pairs = replace(op, **PAIRS)
        if not op.half_width:
            pairs = replace(pairs, half_width=False)
        rows.append(checked(f"{what}, pairs", both(q, k, pairs, **tensors), AS_DENSE * row.us))
    rows += positions(q, k, dense, half, exact, freqs, made)
    del q, k
    rows += packed(half, exact, freqs, made)
    return rows + long_sequences()


def positions(
    q: Tensor, k: Tensor, dense: Row, half: Rope, exact: Rope,
    freqs: dict[str, Tensor], made: dict[str, Tensor],
) -> list[Row]:  # fmt: skip
    """Positions that are read or chunked, beside the rows of a dense launch."""
    (b, _, s, _), limit = q.shape, AS_DENSE * dense.us
    longer = {"freqs": table(2 * s, 128)[..., :64].contiguous()}
    order = torch.arange(s, device="cuda")
    mixed = torch.stack([torch.randperm(s, device="cuda") for _ in range(b)])
    starts = torch.tensor([17, 4096], device="cuda", dtype=torch.int32)
    ranked = replace(half, cp_size=2, cp_rank=1)
    wide = order[None] + starts[:, None] + 2**23
    return [
        checked(
            "position_ids in order", both(q, k, half, **freqs, position_ids=order[None]), limit
        ),
        checked("position_ids at random", both(q, k, half, **freqs, position_ids=mixed)),
        checked("start_positions", both(q, k, half, **longer, start_positions=starts), limit),
        checked(
            "context parallel, bf16 cos and sin",
            both(q, k, replace(ranked, angles="cos_sin"), **angles_of(2 * s, BF16)["cos_sin"]),
            limit,
        ),
        checked(
            "inv_freq exact, position_ids above 2^23",
            both(q, k, exact, **made, position_ids=wide), limit,
        ),
    ]  # fmt: skip


def packed(half: Rope, exact: Rope, freqs: dict[str, Tensor], made: dict[str, Tensor]) -> list[Row]:
    """THD beside the same tokens as one dense sequence."""
    rows: list[Row] = []
    total = 16_384
    q, k = data(1, total, 32, 128, "bshd"), data(1, total, 8, 128, "bshd")
    rows.append(checked("freqs, b1 s16384", both(q, k, half, freqs=table(total, 128)[..., :64])))
    limit = AS_DENSE * rows[0].us
    few = torch.tensor([5000, 100, 3000, 1, 4096, 2000, 1500, 687])
    many = torch.full((256,), 64)
    for what, lengths in (("8 sequences", few), ("256 sequences", many)):
        bounds = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to("cuda", torch.int32)
        starts = torch.arange(len(lengths), device="cuda", dtype=torch.int32)
        given = {"cu_seqlens": bounds}
        rows += [
            checked(
                f"THD, {what}, start_positions",
                both(q, k, half, **freqs, **given, start_positions=starts), limit,
            ),
            checked(f"THD, {what}, inv_freq exact", both(q, k, exact, **made, **given), limit),
        ]  # fmt: skip
    return rows


def long_sequences() -> list[Row]:
    """Where the table is large: 131,072 rows."""
    s = 131_072
    q, k = data(1, s, 32, 128, "bshd"), data(1, s, 8, 128, "bshd")
    rows = [copy := copy_row("one copy of as many bytes, b1 s131072", torch.cat([q, k], 1))]
    half, limit = Rope(128, 0, half_width=True), AS_COPY * copy.us
    ids = torch.arange(s, device="cuda")[None]
    freqs = {"freqs": table(s, 128)[..., :64].contiguous()}
    made = {"inv_freq": 10000 ** (-torch.arange(64, device="cuda", dtype=F32) / 64)}
    of_cos_sin, of_inv_freq = replace(half, angles="cos_sin"), replace(half, angles="inv_freq")
    exact = replace(of_inv_freq, angle_precision="exact")
    tables = angles_of(s, BF16)["cos_sin"]
    plans: list[tuple[str, Rope, dict[str, Tensor]]] = [
        ("position_ids in order", half, freqs | {"position_ids": ids}),
        ("cos and sin, bf16", of_cos_sin, tables),
        ("inv_freq", of_inv_freq, made),
        ("inv_freq, exact", exact, made),
    ]
    rows += [measure(f"{what}, b1 s131072", both(q, k, op, **t), limit) for what, op, t in plans]
    return rows
