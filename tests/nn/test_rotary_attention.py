"""RotaryAttention: values and gradients, the bits of functional, torch's modes, mistakes."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import ropegraph as rg
from ropegraph import angles
from ropegraph.functional import attention, qkv_attention
from ropegraph.nn import RotaryAngles, RotaryAttention
from ropegraph.testing import budget
from tests.nn.reference import attended

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
E, H_Q, H_KV, D, S = 40, 6, 2, 8, 13
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all heads": {"num_kv_heads": None},
    "width from the heads": {"head_dim": None, "num_heads": 5, "num_kv_heads": 1},
    "bias": {"bias": True},
    "bias of one": {"bias": True, "out_bias": False},
    "norm": {"qk_norm": True, "norm_eps": 1e-3},
    "not causal": {"is_causal": False},
    "window": {"window": 4},
    "scale": {"scale": 0.2, "fold": "symmetric"},
    "recomputed": {"recompute_rope": True},
    "yarn": {"angles": YARN},
    "partial": {"angles": {"partial_rotary_factor": 0.5}},
}


def module(dtype: torch.dtype = F64, **options: Any) -> RotaryAttention:
    torch.manual_seed(1)
    given: dict[str, Any] = {"num_heads": H_Q, "num_kv_heads": H_KV, "head_dim": D, **options}
    made = RotaryAttention(E, dtype=dtype, **given)
    with torch.no_grad():
        for p in made.parameters():
            if p.dim() == 1:
                p.copy_(torch.linspace(0.5, 1.5, p.numel()))
    return made


def data(dtype: torch.dtype = F64, b: int = 2, s: int = S) -> Tensor:
    made = torch.randn(b, s, E, generator=torch.Generator().manual_seed(3), dtype=F64)
    return made.to(dtype).requires_grad_()


def gradients(o: Tensor, x: Tensor, layer: RotaryAttention) -> dict[str, Tensor]:
    """Of sum(o cos(index)), by name."""
    weigh = torch.arange(o.numel(), dtype=F64).view(o.shape).cos().to(o.dtype)
    named = dict(layer.named_parameters()) | {"x": x}
    return dict(zip(named, torch.autograd.grad(o, list(named.values()), weigh), strict=True))


@pytest.mark.parametrize("name", MODULES)
def test_values_and_gradients_against_fp64(name: str) -> None:
    layer, x = module(**MODULES[name]), data()
    o = layer(x)
    want, weights, leaf = attended(layer, x)
    torch.testing.assert_close(o, want, rtol=1e-12, atol=1e-12)
    got = gradients(o, x, layer)
    weigh = torch.arange(o.numel(), dtype=F64).view(o.shape).cos()
    exact = torch.autograd.grad(want, [*weights.values(), leaf], weigh)
    for (one, mine), w in zip(got.items(), exact, strict=True):
        torch.testing.assert_close(mine, w, rtol=1e-10, atol=1e-11, msg=one)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ["plain", "window", "recomputed", "yarn"])
def test_the_bits_of_the_function_by_hand(name: str, dtype: torch.dtype) -> None:
    layer, x = module(dtype, **MODULES[name]), data(dtype)
    made = angles.inv_freq(MODULES[name].get("angles", {}), head_dim=D)
    packed = torch.nn.functional.linear(x, layer.qkv_proj.weight)
    o = qkv_attention(
        packed, split=(H_Q, H_KV, H_KV), is_causal=True, window=layer.window,
        recompute_rope=layer.recompute_rope, inv_freq=made.inv_freq,
        attention_factor=made.attention_factor,
    )  # fmt: skip
    by_hand = torch.nn.functional.linear(o.transpose(1, 2).flatten(2), layer.o_proj.weight)
    assert torch.equal(layer(x), by_hand)
    got, want = gradients(layer(x), x, layer), gradients(by_hand, x, layer)
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norms_by_hand_have_the_same_bits(dtype: torch.dtype) -> None:
    layer, x = module(dtype, qk_norm=True, norm_eps=1e-3), data(dtype)
    packed = torch.nn.functional.linear(x, layer.qkv_proj.weight)
    given = {"q_norm": layer.q_norm.weight, "k_norm": layer.k_norm.weight, "norm_eps": 1e-3}
    given |= {"inv_freq": layer.angles.inv_freq, "is_causal": True}
    o = qkv_attention(packed, split=(H_Q, H_KV, H_KV), **given)
    by_hand = torch.nn.functional.linear(o.transpose(1, 2).flatten(2), layer.o_proj.weight)
    assert torch.equal(layer(x), by_hand)
    got, want = gradients(layer(x), x, layer), gradients(by_hand, x, layer)
    assert all(torch.equal(got[n], want[n]) for n in want)
    heads = packed.view(2, S, -1, D).transpose(1, 2).split((H_Q, H_KV, H_KV), dim=1)
    assert torch.equal(attention(*heads, enable_gqa=True, **given), o)


def test_one_packed_gradient_and_no_copy_of_v() -> None:
    layer, x = module(F32), data(F32)
    seen: dict[str, Any] = {}
    layer.qkv_proj.register_forward_hook(lambda m, i, o: seen.update(qkv=o))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        o = layer(x)
    assert seen["qkv"].untyped_storage().data_ptr() in {
        t.untyped_storage().data_ptr() for t in kept
    }
    seen["qkv"].register_hook(lambda g: seen.update(grad=g))
    o.sum().backward()
    assert seen["grad"].shape == seen["qkv"].shape
    assert seen["grad"].is_contiguous()


@pytest.mark.parametrize("name", ["plain", "norm", "yarn"])
def test_bf16_within_budget(name: str) -> None:
    layer, x = module(BF16, **MODULES[name]), data(BF16)
    want = attended(layer, x)[0]
    heads = layer.qkv_proj(x).view(2, S, -1, D).transpose(1, 2)
    q, k, v = heads.split((H_Q, H_KV, H_KV), dim=1)
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    table = angles.freqs(layer.angles.inv_freq, torch.arange(S))[:, 0, 0]
    cos, sin = (t.to(BF16) * layer.angles.attention_factor for t in (table.cos(), table.sin()))

    def rotated(y: Tensor) -> Tensor:  # as models do it by hand
        first, second = y.chunk(2, dim=-1)
        return y * cos + torch.cat((-second, first), dim=-1) * sin

    peer = torch.nn.functional.scaled_dot_product_attention(
        rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
    )
    peer = layer.o_proj(peer.transpose(1, 2).flatten(2))
    want, peer = want.detach(), peer.detach()
    budget.assert_within(layer(x), want, budget.budget(want, peer, BF16), name)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_padding(qk_norm: bool) -> None:
    layer, x = module(qk_norm=qk_norm, bias=True), data()
    lengths = [S, 5]
    o = layer(x, seq_lens=torch.tensor(lengths))
    want = attended(layer, x, len_q=lengths, len_kv=lengths)[0]
    torch.testing.assert_close(o, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(o[1, 5:], layer.o_proj.bias.expand(S - 5, E))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_packed_documents_are_a_loop_over_them(qk_norm: bool) -> None:
    layer, x = module(qk_norm=qk_norm), data(b=1, s=20)
    bounds = [0, 7, 8, 18]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    o = layer(x, cu_seqlens=cu_seqlens, max_seqlen=10)
    want = torch.cat([layer(x[:, i:j]) for i, j in itertools.pairwise(bounds)], dim=1)
    torch.testing.assert_close(o[:, :18], want, rtol=1e-12, atol=1e-12)
    assert not o[:, 18:].any()
    got = torch.autograd.grad(o[:, :18].cos().sum(), [x, *layer.parameters()])
    exact = torch.autograd.grad(want.cos().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-11)


def test_positions_and_a_rotation_that_layers_share() -> None:
    layer, x = module(), data()
    ids = torch.randint(100, (2, S))
    want = attended(layer, x, ids)[0]
    o = layer(x, position_ids=ids)
    torch.testing.assert_close(o, want, rtol=0, atol=1e-6)  # angles are in f32
    assert torch.equal(layer(x, rope=layer.angles(ids)), o)
    shared = RotaryAngles({"rope_type": "linear", "factor": 2.0}, head_dim=D)
    layers = [module(angles=shared) for _ in range(2)]
    assert layers[0].angles is layers[1].angles
    assert torch.equal(layers[0](x), layers[1](x, rope=shared()))
    with pytest.raises(rg.GraphError, match="rope and position_ids both"):
        layer(x, rope=layer.angles(), position_ids=ids)


def test_dynamic_angles_follow_the_length_of_x() -> None:
    parameters = {"rope_type": "dynamic", "factor": 4.0, "max_position_embeddings": 8}
    layer = module(angles=parameters)
    for s in (5, 20, 8):
        x = data(s=s)
        made = angles.inv_freq(parameters, head_dim=D, seq_len=s)
        static = {"inv_freq": made.inv_freq}
        assert torch.equal(layer(x), layer(x, rope=static))


@pytest.mark.parametrize("name", ["plain", "norm"])
def test_compiled_for_every_length(name: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    layer = module(F32, **MODULES[name])
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    frames: set[int] = set()
    for s in (13, 21, 32):
        x = data(F32, s=s)
        got, want = compiled(x), layer(x)
        frames.add(counter.frame_count)
        assert torch.equal(got, want)
        mine, exact = gradients(got, x, layer), gradients(want, x, layer)
        assert all(torch.equal(mine[n], exact[n]) for n in exact)
    assert len(frames) == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_the_dropout_mask(use_reentrant: bool) -> None:
    layer, x = module(F32, dropout=0.3), data(F32)
    torch.manual_seed(5)
    want = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    torch.manual_seed(5)
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    got = [x.grad, *(p.grad for p in layer.parameters())]
    assert all(map(torch.equal, got, want))
    assert torch.equal(layer.eval()(x), layer(x))
    assert not torch.equal(layer.train()(x), layer(x))


def test_states_and_copies() -> None:
    layer, x = module(F32, angles=YARN, qk_norm=True, bias=True), data(F32)
    want = layer(x)
    state = layer.state_dict()
    assert set(state) == {
        "qkv_proj.weight", "qkv_proj.bias", "o_proj.weight", "o_proj.bias", "q_norm.weight",
        "k_norm.weight",
    }  # fmt: skip
    other = module(F32, angles=YARN, qk_norm=True, bias=True)
    for p in other.parameters():
        torch.nn.init.ones_(p)
    other.load_state_dict(state)
    with torch.device("meta"):
        empty = module(F32, angles=YARN, qk_norm=True, bias=True)
    empty.load_state_dict(state, assign=True)
    again = module(F32, angles=YARN, qk_norm=True, bias=True, device="meta").to_empty(device="cpu")
    again.load_state_dict(state)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for one in (other, empty, again, *copies):
        assert torch.equal(one(x), want)


def test_cast_to_bf16_keeps_the_angles() -> None:
    layer = module(F32, angles=YARN)
    cast = copy.deepcopy(layer).to(BF16)
    assert cast.qkv_proj.weight.dtype is BF16
    fresh = module(BF16, angles=YARN)
    fresh.load_state_dict(layer.state_dict())
    x = data(BF16)
    ids = torch.arange(10_000, 10_000 + S)[None]
    assert torch.equal(cast(x, position_ids=ids), fresh(x, position_ids=ids))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_autocast(qk_norm: bool, recwarn: pytest.WarningsRecorder) -> None:
    layer, x = module(F32, qk_norm=qk_norm), data(F32)
    with torch.autocast("cpu", dtype=BF16):
        o = layer(x)
    assert o.dtype is BF16
    cast = copy.deepcopy(layer).to(BF16)
    cast.q_norm, cast.k_norm = layer.q_norm, layer.k_norm  # f32 weights of norms are read as such
    assert torch.equal(o, cast(x.to(BF16)))
    got = gradients(o, x, layer)
    assert all(g.dtype is F32 for g in got.values())
    assert not [w for w in recwarn if "rms_norm" in str(w.message)]


def test_meta_tensors_have_shapes() -> None:
    layer = module(F32, device="meta")
    o = layer(data(F32).detach().to("meta").requires_grad_())
    assert o.shape == (2, S, E)
    o.sum().backward()
    assert layer.qkv_proj.weight.grad.is_meta


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"num_kv_heads": 4}, "num_heads=6 is no multiple of num_kv_heads=4"),
    "width": ({"head_dim": None}, "embed_dim=40 is no multiple of num_heads=6; give head_dim="),
    "none": ({"num_heads": 0}, "num_heads=0; use 1 or more"),
    "kind": ({"num_kv_heads": 2.0}, r"num_kv_heads=2.0 is not a host integer"),
    "dropout": ({"dropout": 1.0}, "dropout=1.0; use 0 or more, and less than 1"),
    "window": ({"window": 0}, "window=0; use 1 or more"),
    "both": ({"window": 3, "is_causal": False}, "window=3 counts .* needs is_causal=True"),
    "epsilon": ({"qk_norm": True, "norm_eps": -1.0}, "norm_eps=-1 is negative; use 0 or more"),
    "no epsilon": ({"qk_norm": True, "norm_eps": None}, "norm_eps=None is not a number"),
    "angles": ({"angles": RotaryAngles(head_dim=16)}, "angles of 16 channels for heads of 8"),
    "flag": ({"is_causal": "no"}, "is_causal='no'; use True or False"),
    "flags": ({"qk_norm": 2}, "qk_norm=2; use True or False"),
    "eps": ({"norm_eps": float("nan")}, "norm_eps=nan is not finite"),
    "below": ({"norm_eps": -1e-6}, "norm_eps=-1e-06 is negative; use 0 or more"),
    "rope": ({"angles": {"rope_type": "yarn", "factr": 2.0}}, "did you mean factor"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    options, match = BAD[name]
    with pytest.raises(rg.GraphError, match=match):
        module(**options)


def test_bad_inputs() -> None:
    layer = module()
    with pytest.raises(rg.GraphError, match=r"x is \[13, 40\]; use \[b, s, 40\]"):
        layer(data()[0])
    with pytest.raises(rg.GraphError, match=r"x is \[2, 13, 39\]"):
        layer(data()[..., :-1])
    with pytest.raises(rg.GraphError, match="max_seqlen=4 speaks of cu_seqlens"):
        layer(data(), max_seqlen=4)
    with pytest.raises(rg.GraphError, match="fold='both'"):
        module(fold="both")(data())
    with pytest.raises(rg.GraphError, match="x is list; use a tensor"):
        layer([1.0])
    with pytest.raises(rg.GraphError, match=r"rope is str; use what angles\(\) gave"):
        layer(data(), rope="default")
    with pytest.raises(rg.GraphError, match="cu_seqlens is list, no tensor"):
        layer(data()[:1], cu_seqlens=[0, S])
