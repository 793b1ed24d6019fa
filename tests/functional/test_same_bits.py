"""The functions, compiled or not, give the bits of the graphs that a user records by hand."""

import pytest
import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.functional import attention, qkv_attention
from tests.functional.cases import H_Q, SPLIT, B, D, S, heads, table


def by_hand(dtype: torch.dtype, packed: bool) -> dict[str, Tensor]:
    """o and all gradients of sum(o cos(o index)), by two graphs."""
    q, k, v = (x.detach() for x in heads(dtype))
    g = rg.pygraph(io_data_type=dtype, handle=rg.create_handle())
    freqs = g.tensor_like(table()[:, None, None], name="freqs")
    pack = {"freqs": table()[:, None, None]}
    if packed:
        pack["qkv"] = torch.cat([x.transpose(1, 2) for x in (q, k, v)], dim=2)
        turned = g.qkv_rope(g.tensor_like(pack["qkv"], name="qkv"), freqs, split=SPLIT)
    else:
        pack |= {"q": q, "k": k, "v": v}
        t = {n: g.tensor_like(pack[n], name=n) for n in "qkv"}
        turned = [g.rope(t["q"], freqs), g.rope(t["k"], freqs), t["v"]]
    names = ["qkv"] if packed else ["q", "k", "v"]
    o, _ = g.sdpa(*turned, D**-0.5, use_causal_mask=True, name="attn")
    o.set_output(True).set_name("o").set_stride(q.stride())
    back = g.backward_graph(["o"], names)
    g.build()
    pack |= g.allocate()
    g.execute(pack)
    do = torch.linspace(-1, 1, q.numel()).to(dtype).view(B, S, H_Q, D).transpose(1, 2)
    grads = back.allocate()
    back.execute({**{n: pack[n] for n in back.saved}, "do": do, **grads})
    return {"o": pack["o"], "do": do, **grads}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recompute", [False, True])
def test_attention(dtype: torch.dtype, recompute: bool) -> None:
    want, inputs = by_hand(dtype, packed=False), heads(dtype)
    o = attention(
        *inputs, table(), is_causal=True, enable_gqa=True, recompute_rope=recompute
    )  # fmt: skip
    assert torch.equal(o, want["o"])
    grads = torch.autograd.grad(o, inputs, want["do"])
    assert all(map(torch.equal, grads, [want[f"d{n}"] for n in "qkv"]))


@pytest.mark.parametrize("recompute", [False, True])
def test_qkv_attention(recompute: bool) -> None:
    want = by_hand(torch.float32, packed=True)
    qkv = torch.cat([x.detach().transpose(1, 2) for x in heads()], dim=2).requires_grad_()
    o = qkv_attention(qkv, table(), split=SPLIT, is_causal=True, recompute_rope=recompute)
    assert torch.equal(o, want["o"])
    assert torch.equal(torch.autograd.grad(o, qkv, want["do"])[0], want["dqkv"])
