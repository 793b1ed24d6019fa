"""What torch itself checks of the operators, and torch.compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ropegraph.functional import attention, library, qkv_attention, rope
from tests.functional.cases import H_Q, SPLIT, B, D, S, heads, table


def captured(name: str, run: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The operator and the arguments that a call hands to it."""
    seen: list[Any] = []
    operator = library.OPERATORS[name].forward

    def watch(*arguments: Any) -> Any:
        seen.append(arguments)
        return operator(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(library.OPERATORS[name], "forward", watch)
        patch.setattr("ropegraph.functional.eager.has_modes", lambda: True)
        run()
    return operator, seen[0]


def some_calls() -> dict[str, tuple[str, Callable[[], Tensor]]]:
    q, k, v = heads()
    bias = torch.randn(1, H_Q, S, S, requires_grad=True)
    packed = torch.randn(B, S, sum(SPLIT), D, requires_grad=True)
    norms = {f"{x}_norm": torch.rand(D, requires_grad=True) for x in "qk"}
    row = [x[:1].detach().requires_grad_() for x in (q, k, v)]
    return {
        "rope": ("rope", lambda: rope(q, table().requires_grad_())),
        "attention": (
            "attention",
            lambda: attention(q, k, v, table(), bias=bias, enable_gqa=True),
        ),
        "recomputed": (
            "attention",
            lambda: attention(q, k, v, table(), enable_gqa=True, recompute_rope=True),
        ),
        "packed": ("qkv_attention", lambda: qkv_attention(packed, table(), split=SPLIT)),
        "normed": ("attention", lambda: attention(q, k, v, table(), enable_gqa=True, **norms)),
        "normed, recomputed": (
            "attention",
            lambda: attention(q, k, v, table(), enable_gqa=True, recompute_rope=True, **norms),
        ),
        "normed, packed": (
            "qkv_attention", lambda: qkv_attention(packed, table(), split=SPLIT, **norms),
        ),
        "normed rows": (
            "norm_rope",
            lambda: attention(
                *row, table(), enable_gqa=True, cu_seqlens=torch.tensor([0, 9, S]), **norms
            ),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("call", some_calls())
def test_opcheck(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, arguments = captured(*some_calls()[call], monkeypatch)
    assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def attend(q: Tensor, k: Tensor, v: Tensor, freqs: Tensor) -> Tensor:
    o = attention(q * 1.5, k, v, freqs, is_causal=True, window=9, enable_gqa=True)
    return o.transpose(1, 2).flatten(2)


def packed_attend(x: Tensor, freqs: Tensor) -> Tensor:
    o = qkv_attention(x, freqs, split=SPLIT, is_causal=True)
    return rope(o, freqs).transpose(1, 2).flatten(2)


def test_compiled_without_breaks_for_every_length() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    frames: set[int] = set()
    for s in (17, 24, 33):
        inputs, freqs = heads(s=s), table(s)
        got, want = compiled(*inputs, freqs), attend(*inputs, freqs)
        assert torch.equal(got, want)
        grads = torch.autograd.grad(got.sum(), inputs)
        assert all(map(torch.equal, grads, torch.autograd.grad(want.sum(), inputs)))
        frames.add(counter.frame_count)
    assert len(frames) == 1


@pytest.mark.parametrize("kind", ["heads", "packed", "rows", "recomputed"])
def test_norms_compiled_without_breaks_have_the_same_bits(kind: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, w_q: Tensor, w_k: Tensor, freqs: Tensor) -> Tensor:
        given = {"q_norm": w_q, "k_norm": w_k, "norm_eps": 1e-3, "is_causal": True}
        if kind == "packed":
            x = torch.cat([y.transpose(1, 2) for y in (q, k, v)], dim=2)
            return qkv_attention(x, freqs, split=SPLIT, **given)
        if kind == "rows":
            given["cu_seqlens"] = bounds
        given["recompute_rope"] = kind == "recomputed"
        return attention(q * 1.5, k, v, freqs, enable_gqa=True, **given)

    bounds = torch.tensor([0, 5, 17])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    frames: set[int] = set()
    for s in (17, 24, 33):
        inputs = [x.detach()[:1].requires_grad_() for x in heads(s=s)]
        inputs += [torch.rand(D, requires_grad=True) for _ in "qk"]
        got, want = compiled(*inputs, table(s)), run(*inputs, table(s))
        assert torch.equal(got, want)
        grads = torch.autograd.grad(got.sum(), inputs)
        assert all(map(torch.equal, grads, torch.autograd.grad(want.sum(), inputs)))
        frames.add(counter.frame_count)
    assert len(frames) == 1


def test_numbers_that_change_with_the_length_are_compiled_once_more_and_not_again() -> None:
    def run(x: Tensor, n: int) -> Tensor:
        seen = attention(x, x, x, table(64), is_causal=True, window=n)
        bounds = torch.tensor([0, 2, n])
        return seen + attention(x, x, x, table(64), cu_seqlens=bounds, max_seqlen=n)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for n in range(5, 17):
        x = torch.randn(1, H_Q, n, D)
        assert torch.equal(compiled(x, n), run(x, n))
    assert counter.frame_count <= 2


def test_compiled_by_inductor() -> None:
    compiled = torch.compile(packed_attend, fullgraph=True)
    for s in (17, 20):
        x, freqs = torch.randn(B, s, sum(SPLIT) * D, requires_grad=True), table(s)
        got, want = compiled(x, freqs), packed_attend(x, freqs)
        assert torch.equal(got, want)
        grads = (torch.autograd.grad(o.square().sum(), x)[0] for o in (got, want))
        torch.testing.assert_close(*grads)


def test_exported() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
            return packed_attend(x, freqs)

    x, freqs = torch.randn(B, S, sum(SPLIT) * D), table()
    program = torch.export.export(Model(), (x, freqs))
    assert "ropegraph.qkv_attention.default" in program.graph_module.code
    assert torch.equal(program.module()(x, freqs), packed_attend(x, freqs))


def test_vmap_over_a_rotation() -> None:
    x = torch.randn(3, B, H_Q, S, D)
    got = torch.func.vmap(lambda x: rope(x, table()))(x)
    assert torch.equal(got, torch.stack([rope(one, table()) for one in x]))
