"""apply_rotary_pos_emb and the extension's fused_rope_*, against the documented formula."""

from __future__ import annotations

import math
from enum import Enum
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
    turned,
)

D, WIDTH, ROWS = 10, 6, 40
INT = torch.int32

# layout, shape of the tokens, and what else is given
CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "sbhd": ("sbhd", (7, 2, 3), {}),
    "bshd": ("bshd", (2, 7, 3), {}),
    "one token": ("bshd", (3, 1, 2), {}),
    "start_positions": ("sbhd", (5, 3, 2), {"starts": [4, 0, 9]}),
    "start_positions, bshd": ("bshd", (3, 5, 2), {"starts": [4, 0, 9]}),
    "cp": ("sbhd", (6, 2, 3), {"cp_size": 2, "cp_rank": 1}),
    "cp, bshd": ("bshd", (2, 4, 3), {"cp_size": 3, "cp_rank": 2}),
    "cp and start_positions": ("sbhd", (6, 2, 3), {"cp_size": 2, "cp_rank": 1, "starts": [3, 1]}),
    "thd": ("thd", (9, 3), {"cu_seqlens": [0, 4, 4, 9]}),
    "thd with slack": ("thd", (11, 3), {"cu_seqlens": [2, 2, 7, 8]}),
    "thd, all empty": ("thd", (3, 2), {"cu_seqlens": [0, 0, 0]}),
    "thd and start_positions": ("thd", (9, 3), {"cu_seqlens": [0, 4, 9], "starts": [6, 2]}),
    "thd and cp": ("thd", (9, 3), {"cu_seqlens": [0, 4, 4, 16], "cp_size": 2, "cp_rank": 1}),
    "thd, cp and start_positions": (
        "thd", (8, 2), {"cu_seqlens": [0, 12, 16], "cp_size": 2, "cp_rank": 0, "starts": [1, 5]},
    ),
}  # fmt: skip


def call(case: str) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
    """The shape of t, what the formula takes, and what apply_rotary_pos_emb takes."""
    layout, lead, extra = CASES[case]
    own = {"tensor_format": layout} | {k: v for k, v in extra.items() if k.startswith("cp_")}
    for name, keyword in (("starts", "start_positions"), ("cu_seqlens", "cu_seqlens")):
        if name in extra:
            own[keyword] = torch.tensor(extra[name], dtype=INT)
    return (*lead, D), {"layout": layout, **extra}, own


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_gradient(case: str, interleaved: bool) -> None:
    shape, formula, own = call(case)
    freqs = table(ROWS, WIDTH)
    t = normal(*shape).requires_grad_()
    with dirty_memory():
        y = te.apply_rotary_pos_emb(t, freqs, interleaved=interleaved, fused=True, **own)
    leaf = t.detach().clone().requires_grad_()
    want = rope(leaf, freqs, interleaved=interleaved, **formula)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-12)
    assert y.shape == t.shape
    assert y.is_contiguous()
    for dy in strange_grad(y):
        before = dy.clone()
        with dirty_memory():
            (got,) = torch.autograd.grad(y, t, dy, retain_graph=True)
        (wanted,) = torch.autograd.grad(want, leaf, dy, retain_graph=True)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
        assert got.is_contiguous()
        assert torch.equal(dy, before)
        # <dy, R x> = <R^T dy, x>
        torch.testing.assert_close((dy * y).sum(), (got * t).sum(), rtol=1e-12, atol=1e-12)
    assert torch.equal(t, leaf)


@pytest.mark.parametrize("case", ["sbhd", "thd, cp and start_positions", "bshd"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_data_types(dtype: torch.dtype, case: str) -> None:
    shape, formula, own = call(case)
    freqs = table(ROWS, WIDTH)
    t = normal(*shape, dtype=dtype).requires_grad_()
    y = te.apply_rotary_pos_emb(t, freqs, fused=True, **own)
    (dx,) = torch.autograd.grad(y, t, t.detach())
    assert y.dtype is dx.dtype is dtype
    leaf = t.detach().double().requires_grad_()
    want = rope(leaf, freqs, **formula)
    (wanted,) = torch.autograd.grad(want, leaf, leaf.detach())
    # fp32 arithmetic, angles off by half an ulp of fp32, then one rounding.
    unit = torch.finfo(dtype).eps / 2
    limit = leaf.detach().abs().amax() * 1.5 * (unit + 8 * torch.finfo(F32).eps)
    assert (y.double() - want).abs().max() <= limit
    assert (dx.double() - wanted).abs().max() <= limit


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_strided_inputs_give_packed_results(layout: str) -> None:
    cu_seqlens = torch.tensor([0, 3, 6], dtype=INT) if layout == "thd" else None
    shape = (6, 3, D) if layout == "thd" else (6, 6, 3, D)
    freqs = table(ROWS, WIDTH)
    plain = normal(*shape)
    want = te.apply_rotary_pos_emb(plain, freqs, layout, fused=True, cu_seqlens=cu_seqlens)
    n = len(shape)
    order = (*range(1, n), 0)
    stores = [
        plain.permute(order).contiguous().permute(*(order.index(i) for i in range(n))),
        plain.transpose(0, 1).contiguous().transpose(0, 1),
        torch.stack((plain, plain), dim=-1)[..., 1],
        torch.cat((plain, plain), dim=-1)[..., :D],
    ]
    for x in stores:
        assert torch.equal(x, plain)
        got = te.apply_rotary_pos_emb(x, freqs, layout, fused=True, cu_seqlens=cu_seqlens)
        assert torch.equal(got, want)
        assert got.is_contiguous()
    one = plain[:, :1].expand(plain.shape)
    got = te.apply_rotary_pos_emb(one, freqs, layout, fused=True, cu_seqlens=cu_seqlens)
    again = te.apply_rotary_pos_emb(one.clone(), freqs, layout, fused=True, cu_seqlens=cu_seqlens)
    assert torch.equal(got, again)


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_the_ranks_together_are_one(cp_size: int, layout: str) -> None:
    s = 4 * cp_size
    axis = 0 if layout == "sbhd" else 1
    shape = (s, 2, 3, D) if layout == "sbhd" else (2, s, 3, D)
    freqs, whole, grad = table(s, WIDTH), normal(*shape, dtype=F32), normal(*shape, seed=2)
    parts = {"y": torch.zeros_like(whole), "dx": torch.zeros_like(whole)}
    for rank in range(cp_size):
        chunks = [slice(2 * r, 2 * r + 2) for r in (rank, 2 * cp_size - 1 - rank)]
        take = torch.cat([torch.arange(s)[c] for c in chunks])
        x = whole.index_select(axis, take).requires_grad_()
        y = te.apply_rotary_pos_emb(x, freqs, layout, fused=True, cp_size=cp_size, cp_rank=rank)
        (dx,) = torch.autograd.grad(y, x, grad.float().index_select(axis, take))
        parts["y"].index_copy_(axis, take, y.detach())
        parts["dx"].index_copy_(axis, take, dx)
    x = whole.requires_grad_()
    y = te.apply_rotary_pos_emb(x, freqs, layout, fused=True)
    assert torch.equal(parts["y"], y)
    assert torch.equal(parts["dx"], torch.autograd.grad(y, x, grad.float())[0])


def test_thd_is_a_loop_over_sequences() -> None:
    cu, starts = [0, 3, 3, 8, 9], [5, 1, 0, 12]
    freqs = table(ROWS, WIDTH)
    t = normal(9, 3, D, dtype=F32)
    got = te.apply_rotary_pos_emb(
        t, freqs, "thd", torch.tensor(starts), fused=True, cu_seqlens=torch.tensor(cu, dtype=INT)
    )
    for i, start in enumerate(starts):
        one = t[cu[i] : cu[i + 1]].unsqueeze(1)
        if one.shape[0]:
            want = te.apply_rotary_pos_emb(one, freqs, "sbhd", torch.tensor([start]), fused=True)
            assert torch.equal(got[cu[i] : cu[i + 1]], want.squeeze(1))


def test_rows_of_no_sequence_are_zero_and_poison_nothing() -> None:
    t = normal(6, 1, 2, dtype=F32)
    t[4:] = torch.nan
    t.requires_grad_()
    cu_seqlens = torch.tensor([0, 2, 4], dtype=INT)
    with dirty_memory():
        y = te.apply_rotary_pos_emb(t, table(2, 2), "thd", fused=True, cu_seqlens=cu_seqlens)
        dy = torch.ones_like(y)
        dy[4:] = torch.nan
        (dx,) = torch.autograd.grad(y, t, dy)
    for result in (y.detach(), dx):
        assert torch.equal(result[4:], torch.zeros(2, 1, 2))
        assert result[:4].isfinite().all()


def test_positions_by_start_and_by_rows_have_the_same_bits() -> None:
    freqs, t = table(ROWS, WIDTH), normal(3, 2, 2, D, dtype=F32)
    starts = torch.tensor([4, 30], dtype=INT)
    got = te.apply_rotary_pos_emb(t, freqs, start_positions=starts, fused=True)
    for i, start in enumerate(starts.tolist()):
        want = te.apply_rotary_pos_emb(t[:, i : i + 1], freqs[start:], fused=True)
        assert torch.equal(got[:, i : i + 1], want)


def test_a_half_filled_table_turns_half_of_the_channels() -> None:
    """Every column is read: where the second half is zero, its channels stay as they are."""
    freqs = table(4, 8)
    freqs[..., 4:] = 0.0
    t = normal(4, 1, 1, 8)
    y = te.apply_rotary_pos_emb(t, freqs, fused=True)
    assert torch.equal(y[..., 4:], t[..., 4:])
    torch.testing.assert_close(y, turned(t, freqs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_rest_is_copied_bit_for_bit(dtype: torch.dtype) -> None:
    t = torch.zeros(2, 1, 1, 8, dtype=dtype)
    t[..., 4:] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    view = torch.int32 if dtype is F32 else torch.int16
    y = te.apply_rotary_pos_emb(t, table(2, 4), fused=True)
    dx = te.fused_rope_backward(t, table(2, 4))
    for got in (y, dx):
        assert torch.equal(got.view(view)[..., 4:], t.view(view)[..., 4:])


def eager(t: Tensor, freqs: Tensor, interleaved: bool) -> Tensor:
    """TransformerEngine's unfused formula, in the type of t."""
    cos, sin = freqs.cos().to(t.dtype), freqs.sin().to(t.dtype)
    d2 = freqs.shape[-1]
    head, rest = t[..., :d2], t[..., d2:]
    if interleaved:
        rot = torch.stack((-head[..., 1::2], head[..., 0::2]), dim=-1).flatten(-2)
    else:
        rot = torch.cat((-head[..., d2 // 2 :], head[..., : d2 // 2]), dim=-1)
    return torch.cat((head * cos + rot * sin, rest), dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_unfused_has_the_bits_of_the_unfused_formula(dtype: torch.dtype, interleaved: bool) -> None:
    t = normal(9, 2, 3, 24, dtype=dtype).requires_grad_()
    freqs = te.RotaryPositionEmbedding(20, interleaved=interleaved)(9)
    y = te.apply_rotary_pos_emb(t, freqs, interleaved=interleaved)
    want = eager(t, freqs, interleaved)
    assert torch.equal(y, want)
    dy = normal(*t.shape, dtype=dtype, seed=3)
    got, wanted = (torch.autograd.grad(z, t, dy)[0] for z in (y, want))
    assert torch.equal(got, wanted)


def test_unfused_with_positions() -> None:
    t = normal(3, 2, 2, D, dtype=BF16)
    freqs, starts = table(ROWS, WIDTH), torch.tensor([4, 30])
    got = te.apply_rotary_pos_emb(t, freqs, start_positions=starts)
    rows = torch.cat([freqs[s : s + 3] for s in starts.tolist()], dim=1)
    assert torch.equal(got, eager(t, rows, interleaved=False))


class NVTE_QKV_Format(Enum):
    NVTE_SBHD = 0
    NVTE_BSHD = 1
    NVTE_THD = 2


@pytest.mark.parametrize("case", CASES)
def test_the_extension_in_its_own_order(case: str) -> None:
    shape, _, own = call(case)
    layout, freqs, t = own["tensor_format"], table(ROWS, WIDTH), normal(*shape).requires_grad_()
    want = te.apply_rotary_pos_emb(t, freqs, fused=True, interleaved=True, **own)
    starts, cu = own.get("start_positions"), own.get("cu_seqlens")
    size, rank = own.get("cp_size", 1), own.get("cp_rank", 0)
    for name in (layout, te.QKVFormat[layout], NVTE_QKV_Format[f"NVTE_{layout.upper()}"]):
        got = te.fused_rope_forward(t, freqs, starts, name, True, cu, size, rank)
        assert torch.equal(got, want)
    (got_dx,) = torch.autograd.grad(got, t, strange_grad(got)[1])
    dx = te.fused_rope_backward(strange_grad(want)[1], freqs, starts, layout, True, cu, size, rank)
    assert torch.equal(dx, got_dx)
    assert torch.equal(dx, torch.autograd.grad(want, t, strange_grad(want)[1])[0])
    assert dx.is_contiguous()


def test_the_older_signature_transposes_memory() -> None:
    freqs, t = table(ROWS, WIDTH), normal(7, 2, 3, D).requires_grad_()
    starts = torch.tensor([4, 0], dtype=INT)
    want = te.fused_rope_forward(t, freqs, starts)
    none = torch.empty(0, dtype=INT)
    plain = te.fused_rope_forward(t, freqs, False, 1, 0, none, starts)
    assert torch.equal(plain, want)
    assert plain.is_contiguous()
    other = te.fused_rope_forward(t, freqs, True, 1, 0, none, starts)
    assert torch.equal(other, want)
    assert other.shape == t.shape
    assert other.transpose(0, 1).is_contiguous()
    dy = strange_grad(want)[2]
    wanted = te.fused_rope_backward(dy, freqs, starts)
    for got in (
        te.fused_rope_backward(dy, freqs, True, 1, 0, none, starts),
        te.fused_rope_backward(dy, freqs, transpose_output_memory=True, start_positions=starts),
        torch.autograd.grad(other, t, dy)[0],
    ):
        assert torch.equal(got, wanted)
        assert got.transpose(0, 1).is_contiguous()
    ranked = te.fused_rope_forward(t[:6], freqs, True, 2, 1)
    assert torch.equal(ranked, te.fused_rope_forward(t[:6], freqs, None, "sbhd", False, None, 2, 1))
    packed = te.fused_rope_forward(t[:, 0], freqs, False, 1, 0, torch.tensor([0, 3, 7]), none)
    assert torch.equal(
        packed, te.fused_rope_forward(t[:, 0], freqs, None, "thd", False, torch.tensor([0, 3, 7]))
    )


def test_gradients_of_gradients() -> None:
    freqs, cu_seqlens = table(ROWS, WIDTH), torch.tensor([0, 2, 3])
    t = normal(4, 2, D).requires_grad_()

    def f(x: Tensor) -> Tensor:
        return te.apply_rotary_pos_emb(x, freqs, "thd", fused=True, cu_seqlens=cu_seqlens) ** 2

    assert torch.autograd.gradcheck(f, t)
    assert torch.autograd.gradgradcheck(f, t)


def test_inputs_are_left_alone_and_a_changed_table_is_noticed() -> None:
    freqs, t = table(ROWS, WIDTH), normal(5, 2, 3, D, dtype=BF16).requires_grad_()
    starts = torch.tensor([3, 0], dtype=INT)
    before = [x.detach().clone() for x in (t, freqs, starts)]
    y = te.apply_rotary_pos_emb(t, freqs, start_positions=starts, fused=True)
    y.sum().backward()
    assert all(torch.equal(x, b) for x, b in zip((t, freqs, starts), before, strict=True))
    assert freqs.grad is None
    y = te.apply_rotary_pos_emb(t, freqs, start_positions=starts, fused=True)
    starts.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_tables_have_no_gradient() -> None:
    freqs = table(5, WIDTH).requires_grad_()
    t = normal(5, 2, 3, D).requires_grad_()
    te.apply_rotary_pos_emb(t, freqs, fused=True).sum().backward()
    assert freqs.grad is None
    with pytest.raises(GraphError, match="freqs requires grad, and fused=False"):
        te.apply_rotary_pos_emb(t, freqs)


def test_the_result_may_be_changed_in_place() -> None:
    t = normal(5, 2, 3, D).requires_grad_()
    y = te.apply_rotary_pos_emb(t, table(5, WIDTH), fused=True)
    y.mul_(2)
    (got,) = torch.autograd.grad(y.sum(), t)
    torch.testing.assert_close((got * t).sum(), y.sum())


def test_narrow_tables_are_cast_by_the_function_and_refused_by_the_extension() -> None:
    t, freqs = normal(5, 2, 3, D), table(5, WIDTH)
    got = te.apply_rotary_pos_emb(t, freqs.double(), fused=True)
    assert torch.equal(got, te.apply_rotary_pos_emb(t, freqs, fused=True))
    with pytest.raises(GraphError, match=r"freqs is torch.float64; angles need torch.float32"):
        te.fused_rope_forward(t, freqs.double())


X, TABLE, PACKED = normal(6, 2, 3, D), table(6, WIDTH), normal(6, 3, D)
CU = torch.tensor([0, 2, 6])
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"t": 3}, "t=3 is no torch tensor; use [s, b, h, d]"),
    "dims": ({"t": PACKED}, "has 3 dims; use [s, b, h, d]"),
    "thd dims": ({"tensor_format": "thd", "cu_seqlens": CU}, "has 4 dims; use [t, h, d]"),
    "format": ({"tensor_format": "bhsd"}, "='bhsd'; use one of 'sbhd', 'bshd', 'thd'"),
    "table dims": ({"freqs": TABLE[:, 0, 0]}, "has 2 dims; use [s2, 1, 1, d2]"),
    "table per batch": ({"freqs": TABLE.expand(6, 2, 1, 6)}, "is no table of angles"),
    "wide table": ({"freqs": table(6, 12)}, "12 columns for 10 channels"),
    "integer table": ({"freqs": TABLE.long()}, "freqs is torch.int64; use a floating type"),
    "complex table": ({"freqs": TABLE + 0j}, "freqs is torch.complex64; use a floating type"),
    "no columns": ({"freqs": table(6, 0)}, "0 columns for 10 channels"),
    "odd table": ({"freqs": table(6, 5)}, "rope_dim=5 of the 10 channels of input is odd"),
    "short table": ({"freqs": table(5, 6)}, "has 5 rows for 6 tokens; use a table of at least 6"),
    "short table on ranks": ({"cp_size": 2}, "has 6 rows for 6 tokens on cp_size=2 ranks"),
    "thd alone": ({"t": PACKED, "tensor_format": "thd"}, "thd needs cu_seqlens="),
    "cu_seqlens without thd": ({"cu_seqlens": CU}, "use 'thd', or leave cu_seqlens out"),
    "cu_seqlens dims": (
        {"t": PACKED, "tensor_format": "thd", "cu_seqlens": CU[None]}, "2 dims; use [n + 1]",
    ),
    "starts dims": ({"start_positions": torch.zeros(2, 1)}, "has 2 dims; use [b]"),
    "starts": ({"start_positions": torch.zeros(3, dtype=INT)}, "use [2], one for each sequence"),
    "starts type": ({"start_positions": torch.zeros(2)}, "start_positions is fp32; use int32"),
    "rank": ({"cp_size": 2, "cp_rank": 2}, "cp_rank=2 with cp_size=2; use 0 to 1"),
    "odd on ranks": (
        {"t": X[:5], "freqs": table(20, 6), "cp_size": 2}, "pad whole sequences to a multiple of",
    ),
    "interleaved": ({"interleaved": 1}, "interleaved=1; use True or False"),
    "fused": ({"fused": "yes"}, "fused='yes'; use True or False"),
    "integers": ({"t": torch.zeros(6, 2, 3, D, dtype=INT)}, "input is int32; use fp16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    changed, text = REFUSED[case]
    given: dict[str, Any] = {"t": X, "freqs": TABLE, "fused": True, **changed}
    with pytest.raises(GraphError) as caught:
        te.apply_rotary_pos_emb(**given)
    assert text in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("cu_seqlens", "text"),
    [
        ([0, 7], "sequence 0 has length 7, which 2*cp_size=4 does not divide"),
        ([0, 4, 10], "sequence 1 has length 6"),
        ([0, 8, 4], "decreases at sequence 1"),
        ([-4, 4], "starts at -4"),
        ([0, 4, 16], "ends at token 16, past the 12 tokens"),
    ],
)
def test_lengths_that_do_not_fit_name_their_sequence(cu_seqlens: list[int], text: str) -> None:
    given = torch.tensor(cu_seqlens, dtype=INT)
    with pytest.raises(PositionError) as caught:
        te.apply_rotary_pos_emb(
            PACKED, table(40, 6), "thd", fused=True, cu_seqlens=given, cp_size=2
        )
    assert text in str(caught.value)


def test_positions_outside_of_the_table() -> None:
    for starts in ([3, 0], [-1, 0]):
        with pytest.raises(PositionError, match="outside of the 4 rows"):
            te.apply_rotary_pos_emb(
                normal(2, 2, 1, 4), table(4, 4), start_positions=torch.tensor(starts), fused=True
            )
    with pytest.raises(PositionError, match="outside of the 4 rows"):
        te.apply_rotary_pos_emb(
            normal(5, 1, 4), table(4, 4), "thd", fused=True, cu_seqlens=torch.tensor([0, 5])
        )


def test_the_extension_refuses_too() -> None:
    with pytest.raises(GraphError, match="transpose_output_memory=True speaks of"):
        te.fused_rope_forward(PACKED, TABLE, True, 1, 0, CU)
    with pytest.raises(GraphError, match=r"or with a bool in third place"):
        te.fused_rope_forward(X, TABLE, None, "sbhd", False, None, 1, 0, 5)
    with pytest.raises(GraphError, match="unexpected keyword argument 'format'"):
        te.fused_rope_backward(X, TABLE, format="sbhd")
    with pytest.raises(GraphError, match="output_grads"):
        te.fused_rope_backward(PACKED, TABLE)


def test_empty_data() -> None:
    for shape in ((0, 2, 3, D), (6, 0, 3, D), (6, 2, 0, D)):
        t = normal(*shape).requires_grad_()
        y = te.apply_rotary_pos_emb(t, TABLE, fused=True)
        y.sum().backward()
        assert y.shape == t.grad.shape == shape


# RotaryPositionEmbedding


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_embedding(interleaved: bool) -> None:
    got = te.RotaryPositionEmbedding(12, 0.5, rotary_base=500.0, interleaved=interleaved)(9, 3)
    position = torch.arange(9, dtype=F32) + 3
    inv_freq = 1.0 / (500.0 ** (torch.arange(0, 6, 2, dtype=F32) / 6))
    half = torch.einsum("i , j -> i j", position, inv_freq)
    want = half.repeat_interleave(2, 1) if interleaved else torch.cat((half, half), 1)
    assert torch.equal(got, want.reshape(9, 1, 1, 6))


@pytest.mark.parametrize(
    ("length", "factor"), [(16, 1 / 2), (17, 1 / (17 / 8)), (30, 1 / (30 / 8))]
)
def test_the_embedding_interpolates(length: int, factor: float) -> None:
    got = te.RotaryPositionEmbedding(8, 1.0, 2, 8)(length, offset=1)
    position = (torch.arange(length, dtype=F32) + 1) * factor
    plain = te.RotaryPositionEmbedding(8)
    half = position[:, None] * plain.inv_freq
    assert torch.equal(got[:, 0, 0], torch.cat((half, half), 1))
    for one in (te.RotaryPositionEmbedding(8, 1.0, 2), te.RotaryPositionEmbedding(8, 1.0, None, 8)):
        assert torch.equal(one(length), plain(length))


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_the_embedding_stays_fp32(cast: str) -> None:
    made = te.RotaryPositionEmbedding(8)
    want = made(2000)
    model = torch.nn.Sequential(made, torch.nn.Linear(2, 2))
    getattr(model, cast)()
    assert made.inv_freq.dtype is F32
    assert torch.equal(made(2000), want)
    assert list(made.state_dict()) == ["inv_freq"]
    with torch.autocast("cpu", BF16):
        assert torch.equal(made(2000), want)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dim": 0}, "dim=0; use 1 or more"),
        ({"dim": 7}, "7"),
        ({"dim": 8, "rotary_percent": 1.5}, "1.5"),
        ({"dim": 8, "rotary_base": -1.0}, "-1"),
        ({"dim": 8, "seq_len_interpolation_factor": 0}, "use more than 0"),
    ],
)
def test_the_embedding_refuses(given: dict[str, Any], text: str) -> None:
    with pytest.raises(GraphError, match=text):
        te.RotaryPositionEmbedding(**given)


@pytest.mark.parametrize("offset", [None, "1", True, math.nan, torch.zeros(2), torch.tensor(1j)])
def test_the_embedding_refuses_what_is_no_offset(offset: Any) -> None:
    with pytest.raises(GraphError, match="RotaryPositionEmbedding: offset"):
        te.RotaryPositionEmbedding(8)(4, offset)


def test_the_embedding_starts_anywhere() -> None:
    made = te.RotaryPositionEmbedding(8)
    for offset in (3, torch.tensor(3), torch.tensor([3])):
        assert torch.equal(made(4, offset), made(7)[3:])
    assert torch.equal(made(2, -1)[:, 0, 0, 0], torch.tensor([-1.0, 0.0]))
