"""The compat functions on a GPU: beside the CPU, bit for bit where bits are promised."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ropegraph.compat import nemo, neuron
from ropegraph.compat import transformer_engine as te

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16, F32 = torch.bfloat16, torch.float32


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


FREQS, CU = 3 * normal(40, 1, 1, 16, seed=7), torch.tensor([0, 8, 8, 24], dtype=torch.int32)
STARTS = torch.tensor([4, 0], dtype=torch.int32)
COS, SIN, HALF = normal(128, 16, seed=2), normal(128, 16, seed=3), normal(32, 2, 5, seed=4)
INV_FREQS, POSITIONS = normal(32, seed=5), torch.tensor([[4, 5], [131072, 131073]])

CALLS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "sbhd": ((7, 2, 3, 24), lambda x: te.apply_rotary_pos_emb(x, at(FREQS, x), fused=True)),
    "interleaved, cp, starts": (
        (6, 2, 3, 24),
        lambda x: te.apply_rotary_pos_emb(
            x, at(FREQS, x), "sbhd", at(STARTS, x), True, True, cp_size=2, cp_rank=1
        ),
    ),
    "thd, cp": (
        (14, 3, 24),
        lambda x: te.apply_rotary_pos_emb(
            x, at(FREQS, x), "thd", fused=True, cu_seqlens=at(CU, x), cp_size=2, cp_rank=1
        ),
    ),
    "qkv": (
        (6, 2, 3, 96),
        lambda x: torch.cat(
            te.apply_fused_qkv_rotary_pos_emb(
                x, at(FREQS, x), at(FREQS + 1, x), [48, 24, 24], start_positions=at(STARTS, x)
            ),
            dim=2,
        ),
    ),
    "RoPE": ((64, 2, 3, 5), lambda x: neuron.RoPE(x, at(HALF, x), at(HALF + 1, x))),
    "RoPE, pairs": (
        (64, 2, 3, 5),
        lambda x: neuron.RoPE(x, at(HALF, x), at(HALF + 1, x), contiguous_layout=False),
    ),
    "rope_hf": (
        (2, 3, 128, 16),
        lambda x: torch.cat(neuron.rope_hf(x, x[:, :1], cos=at(COS, x), sin=at(SIN, x)), dim=1),
    ),
    "decode": ((2, 3, 2, 64), lambda x: neuron.rope(x, at(INV_FREQS, x), at(POSITIONS, x), 0.125)),
}


def at(t: Tensor, like: Tensor) -> Tensor:
    return t.to(like.device)


def both(x: Tensor, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    x = x.requires_grad_()
    y = f(x)
    dy = y.detach().transpose(0, 1).contiguous().transpose(0, 1)
    return y.detach().cpu(), torch.autograd.grad(y, x, dy)[0].cpu()


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_beside_the_cpu(name: str, dtype: torch.dtype) -> None:
    shape, f = CALLS[name]
    x = normal(*shape).to(dtype)
    for got, want in zip(both(x.cuda(), f), both(x, f), strict=True):
        # Two roundings that differ, and angles of 2^17 radians a few ulp of fp32 apart.
        limit = 4 * want.abs().max() * (torch.finfo(dtype).eps + 16 * torch.finfo(F32).eps)
        assert (got.double() - want.double()).abs().max() <= limit


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
def test_nemo_has_the_same_bits(dtype: torch.dtype) -> None:
    x, angles = normal(2, 33, 3, 41).to(dtype), 30 * normal(2, 33, 16, seed=1)
    gpu = both(x.cuda(), lambda t: nemo.apply_rope_triton(t, at(angles, t)))
    unit = torch.view_as_real(torch.polar(torch.ones_like(angles.cuda()), angles.cuda())).cpu()
    c, s = (t.unsqueeze(2).double() for t in unit.unbind(-1))
    x0, x1 = (x[..., 9 + i :: 2].float() for i in (0, 1))
    turned = (  # fp64 holds each product exactly; the sums are rounded to fp32 as good as once
        (x0.double() * c - (x1 * s.float()).double()).float(),
        (x0.double() * s + (x1 * c.float()).double()).float(),
    )
    want = torch.cat((x[..., :9], torch.stack(turned, -1).flatten(-2).to(dtype)), dim=-1)
    assert (gpu[0] != want).sum() <= 2


@pytest.mark.parametrize("interleaved", [False, True])
def test_unfused_has_the_bits_of_the_unfused_formula(interleaved: bool) -> None:
    t, freqs = normal(9, 2, 3, 24).to(BF16).cuda(), FREQS[:9].cuda()
    got = te.apply_rotary_pos_emb(t, freqs, interleaved=interleaved)
    cos, sin = freqs.cos().to(BF16), freqs.sin().to(BF16)
    head = t[..., :16]
    if interleaved:
        rot = torch.stack((-head[..., 1::2], head[..., 0::2]), dim=-1).flatten(-2)
    else:
        rot = torch.cat((-head[..., 8:], head[..., :8]), dim=-1)
    assert torch.equal(got, torch.cat((head * cos + rot * sin, t[..., 16:]), dim=-1))


def test_mxfp8_has_the_bytes_of_the_cpu() -> None:
    kv, k_rope = normal(64, 2, 4, 256).to(BF16), normal(64, 2, 64, seed=1).to(BF16)
    cos, sin = normal(64, 64, seed=2), normal(64, 64, seed=3)
    want = te.fused_mla_kv_rope_mxfp8(kv, k_rope, cos, sin)
    got = te.fused_mla_kv_rope_mxfp8(*(t.cuda() for t in (kv, k_rope, cos, sin)))
    for side, other in zip(got, want, strict=True):
        for a, b in zip(vars(side).values(), vars(other).values(), strict=True):
            assert torch.equal(a.cpu(), b)


def test_positions_outside_of_the_table_are_nan_and_slack_is_zero() -> None:
    t, freqs = normal(10, 1, 8).cuda(), FREQS[:4, ..., :8].cuda()
    cu_seqlens = torch.tensor([0, 6, 8], device="cuda")
    y = te.apply_rotary_pos_emb(t, freqs, "thd", fused=True, cu_seqlens=cu_seqlens)
    assert y[4:6].isnan().all()
    assert not y[:4].isnan().any()
    assert torch.equal(y[8:], torch.zeros_like(y[8:]))


def test_the_callers_device_and_stream() -> None:
    x, freqs = normal(7, 2, 3, 24).cuda(), FREQS.cuda()
    want = te.apply_rotary_pos_emb(x, freqs, fused=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = te.apply_rotary_pos_emb(x, freqs, fused=True)
    stream.synchronize()
    assert torch.equal(got, want)
    cpu = te.apply_rotary_pos_emb(x.cpu(), FREQS, fused=True)
    torch.testing.assert_close(got.cpu(), cpu, rtol=0, atol=1e-5)
