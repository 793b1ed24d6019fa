"""A cuDNN Frontend script, ported by its import: everything below that line is FE's own API.

Causal attention with two key-value heads for six query heads, in half precision: forward, then
backward, each a graph that is declared, planned and executed. It runs on the CPU, and on a GPU
where there is one. The result is compared with torch in float32.
"""

import torch
import torch.nn.functional as F

import ropegraph as cudnn  # was: import cudnn

B, H_Q, H_KV, S, D = 2, 6, 2, 56, 64
SCALE = D**-0.5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = {
    "io_data_type": cudnn.data_type.HALF,
    "intermediate_data_type": cudnn.data_type.FLOAT,
    "compute_data_type": cudnn.data_type.FLOAT,
}


def half(heads):
    """Random numbers, [b, h, s, d] over memory that is laid out [b, s, h, d]."""
    return torch.randn(B, S, heads, D, dtype=torch.half, device=DEVICE).transpose(1, 2)


def plan(graph):
    """FE's life cycle, step by step; graph.build() is the same in one call."""
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=DEVICE)


def forward(handle, q, k, v):
    o, stats = torch.empty_like(q), torch.empty(B, H_Q, S, 1, device=DEVICE)
    graph = cudnn.pygraph(**TYPES)
    tq, tk, tv = (graph.tensor_like(x) for x in (q, k, v))
    to, tstats = graph.sdpa(
        name="sdpa",
        q=tq,
        k=tk,
        v=tv,
        generate_stats=True,
        attn_scale=SCALE,
        use_causal_mask=True,
    )
    to.set_output(True).set_dim(o.size()).set_stride(o.stride())
    tstats.set_output(True).set_data_type(cudnn.data_type.FLOAT)
    workspace = plan(graph)
    graph.execute({tq: q, tk: k, tv: v, to: o, tstats: stats}, workspace, handle=handle)
    return o, stats


def backward(handle, q, k, v, o, do, stats):
    given = (q, k, v, o, do, stats)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    graph = cudnn.pygraph(**TYPES)
    tq, tk, tv, to, tdo, tstats = inputs = [graph.tensor_like(x) for x in given]
    outputs = graph.sdpa_backward(
        name="sdpa_backward",
        q=tq,
        k=tk,
        v=tv,
        o=to,
        dO=tdo,
        stats=tstats,
        attn_scale=SCALE,
        use_causal_mask=True,
    )
    for tensor, buffer in zip(outputs, gradients, strict=True):
        tensor.set_output(True).set_dim(buffer.size()).set_stride(buffer.stride())
    workspace = plan(graph)
    pack = dict(zip((*inputs, *outputs), (*given, *gradients), strict=True))
    graph.execute(pack, workspace, handle=handle)
    return gradients


def expected(q, k, v, do):
    q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    return o, *torch.autograd.grad(o, (q, k, v), do.float())


def main():
    torch.manual_seed(0)
    q, k, v, do = half(H_Q), half(H_KV), half(H_KV), half(H_Q)
    handle = cudnn.create_handle()
    o, stats = forward(handle, q, k, v)
    gradients = backward(handle, q, k, v, o, do, stats)
    cudnn.destroy_handle(handle)

    names = ("o", "dq", "dk", "dv")
    for name, got, want in zip(names, (o, *gradients), expected(q, k, v, do), strict=True):
        torch.testing.assert_close(got.float(), want, atol=5e-3, rtol=3e-3)
        print(f"{name:<3} largest difference from torch {(got.float() - want).abs().max():.1e}")
    print(f"ran on {DEVICE}, cuDNN backend version {cudnn.backend_version()}")


if __name__ == "__main__":
    main()
