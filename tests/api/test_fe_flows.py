"""How scripts for cuDNN Frontend look: they run here by another import, and agree with torch."""

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph as cudnn

B, H, S, D = 2, 3, 24, 16
SCALE = 1 / sqrt(D)
TYPES: dict[str, Any] = {
    "io_data_type": cudnn.data_type.HALF,
    "intermediate_data_type": cudnn.data_type.FLOAT,
    "compute_data_type": cudnn.data_type.FLOAT,
}
PLANS = [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]


def bshd(n: int, h: int = H) -> list[Tensor]:
    """Halves whose memory is [b, s, h, d], seen as [b, h, s, d]."""
    torch.manual_seed(0)
    return [torch.randn(B, S, h, D, dtype=torch.half).transpose(1, 2) for _ in range(n)]


def with_autograd(q: Tensor, k: Tensor, v: Tensor, d_o: Tensor | None = None) -> list[Tensor]:
    leaves = [x.float().detach().requires_grad_() for x in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=SCALE)
    if d_o is None:
        return [o]
    return [o, *torch.autograd.grad(o, leaves, d_o.float())]


def check(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b, atol=5e-3, rtol=3e-3)


@pytest.fixture
def handle():
    made = cudnn.create_handle()
    yield made
    cudnn.destroy_handle(made)


def test_explicit_steps_forward_and_backward(handle: Any):
    q, k, v, d_o = bshd(4)
    o, stats = torch.empty_like(q), torch.empty(B, H, S, 1)

    forward = cudnn.pygraph(**TYPES, handle=handle)
    tq, tk, tv = (forward.tensor_like(x) for x in (q, k, v))
    to, ts = forward.sdpa(
        q=tq, k=tk, v=tv, attn_scale=SCALE, use_causal_mask=True, generate_stats=True, name="sdpa"
    )
    to.set_output(True).set_dim(list(o.shape)).set_stride(list(o.stride()))
    ts.set_output(True).set_data_type(cudnn.data_type.FLOAT)
    ts.set_dim([B, H, S, 1]).set_stride([H * S, S, 1, 1])
    forward.validate()
    forward.build_operation_graph()
    forward.create_execution_plans(PLANS)
    forward.check_support()
    forward.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
    workspace = torch.empty(max(1, forward.get_workspace_size()), dtype=torch.uint8)
    forward.execute({tq: q, tk: k, tv: v, to: o, ts: stats}, workspace, handle=handle)

    backward = cudnn.pygraph(**TYPES, handle=handle)
    given = {n: backward.tensor_like(x) for n, x in
             {"q": q, "k": k, "v": v, "o": o, "dO": d_o, "stats": stats}.items()}  # fmt: skip
    outs = backward.sdpa_backward(
        **given, attn_scale=SCALE, use_causal_mask=True, use_deterministic_algorithm=True
    )
    grads = [torch.empty_like(x) for x in (q, k, v)]
    for t, x in zip(outs, grads, strict=True):
        t.set_output(True).set_dim(x.size()).set_stride(x.stride())
    backward.build(PLANS)
    pack = dict(zip(given.values(), (q, k, v, o, d_o, stats), strict=True))
    pack |= dict(zip(outs, grads, strict=True))
    backward.execute(pack, torch.empty(max(1, backward.get_workspace_size()), dtype=torch.uint8))
    check([o, *grads], with_autograd(q, k, v, d_o))


def test_the_context_manager_forward_and_backward(handle: Any):
    q, k, v, d_o = bshd(4)
    inputs = [f"attn::{n}" for n in "qkv"]
    with cudnn.Graph(**TYPES, inputs=inputs, outputs=["y", "lse"]) as forward:
        y, lse = forward.sdpa(
            q=q, k=k, v=v, attn_scale=SCALE, is_inference=False, use_causal_mask=True, name="attn"
        )
        y.set_output(True).set_dim(q.shape).set_stride(q.stride()).set_name("y")
        lse.set_output(True).set_data_type(cudnn.data_type.FLOAT).set_name("lse")
    o, stats = forward(q, k, v, handle=handle)
    assert (o.dtype, o.stride(), stats.dtype) == (torch.half, q.stride(), torch.float32)

    names = [f"back::{n}" for n in ("q", "k", "v", "o", "dO", "stats")]
    with cudnn.Graph(**TYPES, inputs=names, outputs=["dq", "dk", "dv"]) as backward:
        outs = backward.sdpa_backward(
            q=q, k=k, v=v, o=o, dO=d_o, stats=stats, attn_scale=SCALE, use_causal_mask=True,
            name="back",
        )  # fmt: skip
        for t, x, name in zip(outs, (q, k, v), ("dq", "dk", "dv"), strict=True):
            t.set_output(True).set_dim(x.shape).set_stride(x.stride()).set_name(name)
    grads = backward(q, k, v, o, d_o, stats, handle=handle)
    check([o, *grads], with_autograd(q, k, v, d_o))


def into_pages(x: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """The tokens of x in shuffled pages [b * n, h, page, d], and the table [b, 1, n, 1]."""
    n = S // page
    order = torch.randperm(B * n)
    pool = torch.full((B * n, x.shape[1], page, D), torch.nan, dtype=x.dtype)
    for b in range(B):
        for i in range(n):
            pool[order[b * n + i]] = x[b, :, i * page : (i + 1) * page]
    return pool, order.to(torch.int32).reshape(B, 1, n, 1)


@pytest.mark.parametrize("page", [4, 8, 24])
@pytest.mark.parametrize("length_type", [torch.int32, torch.int64])
def test_paged_keys_and_values(handle: Any, page: int, length_type: torch.dtype):
    q, k, v = bshd(3)
    (k_pool, k_table), (v_pool, v_table) = into_pages(k, page), into_pages(v, page)
    lengths = torch.full((B, 1, 1, 1), S, dtype=length_type)
    bound = {"q": q, "k": k_pool, "v": v_pool, "k_table": k_table, "v_table": v_table,
             "len_q": lengths, "len_kv": lengths.clone()}  # fmt: skip
    g = cudnn.pygraph(**TYPES, handle=handle)
    t = {name: g.tensor_like(x) for name, x in bound.items()}
    o, _ = g.sdpa(
        name="sdpa",
        q=t["q"],
        k=t["k"],
        v=t["v"],
        generate_stats=False,
        attn_scale=SCALE,
        use_causal_mask=True,
        use_padding_mask=True,
        seq_len_q=t["len_q"],
        seq_len_kv=t["len_kv"],
        paged_attention_k_table=t["k_table"],
        paged_attention_v_table=t["v_table"],
        paged_attention_max_seq_len_kv=S,
    )
    o.set_output(True).set_dim(q.shape).set_stride(q.stride())
    g.build(PLANS)
    buffer = torch.full_like(q, torch.nan)
    g.execute({o: buffer, **{t[n]: x for n, x in bound.items()}}, None, handle)
    check([buffer], with_autograd(q, k, v))


def test_rotation_and_attention_in_one_graph(handle: Any):
    """FE's own rope test: tensors by uid, one table of max(s_q, s_kv) rows."""
    q, k, v = bshd(3)
    angles = torch.outer(torch.arange(S).float(), 10000.0 ** (-torch.arange(0, D, 2) / D))
    freqs = torch.cat([angles, torch.zeros_like(angles)], dim=1).reshape(S, 1, 1, D)
    g = cudnn.pygraph(**TYPES, handle=handle)
    uids = {"q": 1, "k": 2, "v": 3, "freqs": 4, "o": 5}
    t = {n: g.tensor(x.shape, x.stride(), x.dtype, uid=uids[n])
         for n, x in {"q": q, "k": k, "v": v, "freqs": freqs}.items()}  # fmt: skip
    q_rot = g.rope(t["q"], t["freqs"], output_scale=SCALE, name="rope_q")
    k_rot = g.rope(t["k"], t["freqs"], name="rope_k")
    o, _ = g.sdpa(q_rot, k_rot, t["v"], use_causal_mask=True, is_inference=True)
    o.set_output(True).set_uid(uids["o"]).set_stride(q.stride())
    g.build([cudnn.heur_mode.A])
    buffer = torch.full_like(q, torch.nan)
    pack = {1: q, 2: k, 3: v, 4: freqs, 5: buffer}
    g.execute(pack, torch.empty(g.get_workspace_size(), dtype=torch.uint8), handle=handle)

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.float().chunk(2, dim=3)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=3)

    check([buffer], with_autograd(rotate(q), rotate(k), v))


def test_jit_and_graph_cache():
    """FE's decorators: one graph a shape, built once."""
    built: list[Any] = []

    @cudnn.jit(heur_modes=PLANS)
    @cudnn.graph_cache(key_fn=lambda handle, x: (tuple(x.shape), x.dtype))
    def attend(handle: Any, x: Tensor) -> Any:
        built.append(x.shape)
        with cudnn.graph(handle, io=cudnn.data_type.HALF) as (g, _):
            t = g.tensor_like(x)
            o, _ = g.sdpa(t, t, t, attn_scale=SCALE, use_causal_mask=True, is_inference=True)
            o.set_output(True)
        return g, [t, o]

    (x,) = bshd(1)
    made = cudnn.create_handle()
    for _ in range(2):
        g, (t, o) = attend(made, x)
        buffer = torch.full(x.shape, torch.nan, dtype=torch.half).as_strided(
            x.shape, o.get_stride()
        )
        g.execute({t: x, o: buffer}, torch.empty(g.get_workspace_size(), dtype=torch.uint8), made)
        check([buffer], with_autograd(x, x, x))
    assert len(built) == 1


def test_the_names_of_the_module():
    for name in (
        "pygraph", "Graph", "graph", "jit", "graph_cache", "tensor", "data_type", "heur_mode",
        "build_plan_policy", "diagonal_alignment", "attention_implementation", "tensor_reordering",
        "create_handle", "destroy_handle", "set_stream", "get_stream", "backend_version",
        "backend_version_string", "create_device_properties", "__version__",
        "cudnnGraphNotSupportedError",
    ):  # fmt: skip
        assert hasattr(cudnn, name), name
        assert name in cudnn.__all__
    assert cudnn.cudnnGraphNotSupportedError is cudnn.UnsupportedError
    assert {m.name for m in cudnn.heur_mode} == {"A", "B", "FALLBACK", "OPENSOURCE"}
    assert {m.name for m in cudnn.build_plan_policy} == {"HEURISTICS_CHOICE", "ALL"}
