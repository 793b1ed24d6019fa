"""Packed QKV as TransformerEngine splits and rotates it, against the documented formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.compat import transformer_engine as te
from ropegraph.errors import GraphError, PositionError
from tests.compat.te import (
    BF16,
    F16,
    F32,
    dirty_memory,
    normal,
    rope,
    strange_grad,
    table,
)

D, WIDTH, ROWS = 10, 6, 40
INT = torch.int32
Parts = list[Tensor]


def formula(qkv: Tensor, q_freqs: Tensor, k_freqs: Tensor, n: int, **how: Any) -> Parts:
    """Head g n + i of Q is head i of group g; all from one tensor, in fp64."""
    q, k, v = qkv.split((n * D, D, D), dim=-1)
    q = q.reshape(*q.shape[:2], -1, D)
    return [rope(q, q_freqs, **how), rope(k, k_freqs, **how), v]


# layout, n, groups, and what else is given
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "groups": ("sbhd", 4, 3, {}),
    "groups, bshd": ("bshd", 4, 3, {}),
    "one head": ("sbhd", 1, 3, {}),
    "one group": ("bshd", 3, 1, {}),
    "start_positions": ("sbhd", 4, 2, {"starts": [4, 0]}),
    "start_positions, bshd": ("bshd", 1, 2, {"starts": [4, 9]}),
    "cp": ("sbhd", 2, 2, {"cp_size": 2, "cp_rank": 1}),
    "cp, bshd": ("bshd", 2, 2, {"cp_size": 3, "cp_rank": 0}),
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradient(case: str, interleaved: bool) -> None:
    layout, n, groups, extra = CASES[case]
    lead = (6, 2) if layout == "sbhd" else (2, 6)
    qkv = normal(*lead, groups, (n + 2) * D).requires_grad_()
    q_freqs, k_freqs = table(ROWS, WIDTH, seed=1), table(ROWS, WIDTH, seed=2)
    split = [n * D, D, D]
    own = {k: v for k, v in extra.items() if k.startswith("cp_")}
    if "starts" in extra:
        own["start_positions"] = torch.tensor(extra["starts"], dtype=INT)
    with dirty_memory():
        made = te.apply_fused_qkv_rotary_pos_emb(
            qkv, q_freqs, k_freqs, split, layout, interleaved=interleaved, **own
        )
    leaf = qkv.detach().clone().requires_grad_()
    want = formula(leaf, q_freqs, k_freqs, n, layout=layout, interleaved=interleaved, **extra)
    for got, w in zip(made, want, strict=True):
        torch.testing.assert_close(got, w, rtol=0, atol=1e-12)
        assert got.is_contiguous()
    assert torch.equal(made[2], want[2])
    for kind in range(3):
        grads = [strange_grad(x, seed=9 + i)[kind] for i, x in enumerate(made)]
        with dirty_memory():
            (dqkv,) = torch.autograd.grad(made, qkv, grads, retain_graph=True)
        (wanted,) = torch.autograd.grad(want, leaf, grads, retain_graph=True)
        torch.testing.assert_close(dqkv, wanted, rtol=0, atol=1e-12)
        assert dqkv.is_contiguous()
        inner = sum((g * x).sum() for g, x in zip(grads, made, strict=True))
        torch.testing.assert_close(inner, (dqkv * qkv).sum(), rtol=1e-12, atol=1e-12)
        raw = te.fused_qkv_rope_backward(
            *grads, q_freqs, k_freqs, split, layout, interleaved, **own
        )
        assert torch.equal(raw, dqkv)
    assert torch.equal(qkv, leaf)


def test_a_gradient_of_q_alone() -> None:
    qkv = normal(3, 1, 2, 3 * D).requires_grad_()
    freqs = table(3, WIDTH)
    q, _, _ = te.apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [D, D, D])
    with dirty_memory():
        (got,) = torch.autograd.grad(q.sum(), qkv)
    assert torch.equal(got[..., D:], torch.zeros(3, 1, 2, 2 * D))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_data_types(dtype: torch.dtype) -> None:
    qkv = normal(6, 2, 2, 5 * D, dtype=dtype)
    freqs = table(6, WIDTH)
    made = te.apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [3 * D, D, D])
    limit = 1.5 * qkv.abs().max() * (torch.finfo(dtype).eps / 2 + 8 * torch.finfo(F32).eps)
    for got, want in zip(made, formula(qkv.double(), freqs, freqs, 3), strict=True):
        assert got.dtype is dtype
        assert (got.double() - want).abs().max() <= limit


def test_the_parts_are_what_the_single_rotation_gives() -> None:
    qkv = normal(6, 2, 3, 4 * D, dtype=BF16)
    q_freqs, k_freqs = table(6, WIDTH, seed=1), table(6, WIDTH, seed=2)
    q, k, v = te.apply_fused_qkv_rotary_pos_emb(qkv, q_freqs, k_freqs, [2 * D, D, D])
    parts = qkv.split((2 * D, D, D), dim=-1)
    alone = te.apply_rotary_pos_emb(parts[0].reshape(6, 2, 6, D), q_freqs, fused=True)
    assert torch.equal(q, alone)
    assert torch.equal(k, te.apply_rotary_pos_emb(parts[1], k_freqs, fused=True))
    assert torch.equal(v, parts[2])
    assert v.data_ptr() != parts[2].data_ptr()


def test_any_strides_and_the_extension() -> None:
    plain = normal(6, 2, 3, 4 * D)
    freqs, starts = table(9, WIDTH), torch.tensor([3, 1])
    want = te.apply_fused_qkv_rotary_pos_emb(
        plain, freqs, freqs, [2 * D, D, D], start_positions=starts
    )
    for qkv in (
        plain.transpose(0, 1).contiguous().transpose(0, 1),
        plain.expand(1, 6, 2, 3, 40)[0],
    ):
        got = te.fused_qkv_rope_forward(
            qkv, freqs, freqs.clone(), starts, [2 * D, D, D], te.QKVFormat["sbhd"], False, 1, 0
        )
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_ranks_together_are_one() -> None:
    s, freqs = 12, table(12, WIDTH)
    whole = normal(s, 2, 2, 4 * D, dtype=F32)
    want = te.apply_fused_qkv_rotary_pos_emb(whole, freqs, freqs, [2 * D, D, D])
    got = [torch.zeros_like(x) for x in want]
    for rank in range(3):
        take = torch.cat([torch.arange(2 * r, 2 * r + 2) for r in (rank, 5 - rank)])
        made = te.apply_fused_qkv_rotary_pos_emb(
            whole[take], freqs, freqs, [2 * D, D, D], cp_size=3, cp_rank=rank
        )
        for part, x in zip(got, made, strict=True):
            part[take] = x
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_results_are_their_own_and_inputs_are_left_alone() -> None:
    leaf = normal(3, 1, 2, 4 * D).requires_grad_()
    freqs = table(3, WIDTH)
    before = leaf.detach().clone()
    q, k, v = te.apply_fused_qkv_rotary_pos_emb(leaf, freqs, freqs, [2 * D, D, D])
    for x in (q, k, v):
        x.mul_(2)
    assert torch.equal(leaf, before)
    (got,) = torch.autograd.grad(q.sum() + k.sum() + v.sum(), leaf)
    torch.testing.assert_close((got * leaf).sum(), q.sum() + k.sum() + v.sum())


def test_gradients_of_gradients() -> None:
    freqs, starts = table(5, 4), torch.tensor([2])
    qkv = normal(2, 1, 1, 12).requires_grad_()

    def f(x: Tensor) -> tuple[Tensor, ...]:
        made = te.apply_fused_qkv_rotary_pos_emb(x, freqs, freqs, [4, 4, 4], start_positions=starts)
        return tuple(y**2 for y in made)

    assert torch.autograd.gradcheck(f, qkv)
    assert torch.autograd.gradgradcheck(f, qkv)


QKV, TABLE = normal(6, 2, 3, 4 * D), table(6, WIDTH)
GIVEN: dict[str, Any] = {
    "qkv": QKV, "q_freqs": TABLE, "k_freqs": TABLE, "qkv_split_arg_list": [2 * D, D, D],
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "thd": ({"tensor_format": "thd"}, "thd is not served, as in TransformerEngine"),
    "cu_seqlens": ({"cu_seqlens": torch.tensor([0, 6])}, "cu_seqlens has no meaning for sbhd"),
    "starts on ranks": (
        {"start_positions": torch.zeros(2, dtype=INT), "cp_size": 2, "q_freqs": table(12, 6)},
        "start_positions with cp_size=2 is not served",
    ),
    "dims": ({"qkv": QKV[0]}, "has 3 dims; use [s, b, g, (n + 2) d]"),
    "split": ({"qkv_split_arg_list": [D, D]}, "use [n d, d, d]"),
    "split of v": ({"qkv_split_arg_list": [2 * D, D, 2 * D]}, "use [n d, d, d]"),
    "split of q": ({"qkv_split_arg_list": [15, D, D]}, "use [n d, d, d]"),
    "no list": ({"qkv_split_arg_list": 3}, "qkv_split_arg_list=3; use a list"),
    "sum": ({"qkv_split_arg_list": [D, D, D]}, "adds up to 30, but a group of qkv is 40 wide"),
    "wide table": ({"q_freqs": table(6, 12)}, "emb: q_freqs [6, 1, 1, 12] has 12 columns"),
    "no table": ({"k_freqs": None}, "k_freqs=None is no torch tensor"),
    "integer table": ({"k_freqs": TABLE.long()}, "k_freqs is torch.int64; use a floating type"),
    "other width": ({"k_freqs": table(6, 4)}, "is 4 wide, but rope_dim=6"),
    "short table": ({"k_freqs": table(5, 6)}, "k_freqs [5, 1, 1, 6] has 5 rows for 6 tokens"),
    "short on ranks": ({"cp_size": 2}, "6 tokens on cp_size=2 ranks"),
    "odd on ranks": (
        {"qkv": QKV[:5], "q_freqs": table(20, 6), "k_freqs": table(20, 6), "cp_size": 2},
        "pad whole sequences",
    ),
    "starts": ({"start_positions": torch.zeros(3, dtype=INT)}, "use [2], one for each"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    changed, text = REFUSED[case]
    with pytest.raises(GraphError) as caught:
        te.apply_fused_qkv_rotary_pos_emb(**{**GIVEN, **changed})
    assert text in str(caught.value), caught.value


def test_the_extension_refuses() -> None:
    older: Any = False
    with pytest.raises(GraphError, match="does not say how qkv is packed"):
        te.fused_qkv_rope_forward(QKV, TABLE, TABLE, 6, older, 1, 0, None)
    q, k = normal(6, 2, 6, D), normal(6, 2, 3, D)
    with pytest.raises(GraphError, match=r"q_grad_out is \[6, 2, 3, 10\]; with .* use \[6, 2, 6"):
        te.fused_qkv_rope_backward(k, k, k, TABLE, TABLE, [2 * D, D, D])
    with pytest.raises(GraphError, match=r"v_grad_out is \[6, 2, 6, 10\]"):
        te.fused_qkv_rope_backward(q, k, q, TABLE, TABLE, [2 * D, D, D])


def test_positions_outside_of_the_table() -> None:
    with pytest.raises(PositionError, match="outside of the 6 rows"):
        te.apply_fused_qkv_rotary_pos_emb(**GIVEN, start_positions=torch.tensor([0, 1]))
