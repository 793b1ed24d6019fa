"""RMS norm and rotation of Q and K in one launch, beside rope alone and beside a copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.cli.bench.positions import dense
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.work import Handles, Work, beside_copy, ratio
from ropegraph.cli.bench.workload import BF16, D, half_angles, separate_heads

AS_ROPE = 1.10
EPSILON = 1e-6
ALL_HEADS = "norm over all heads of a token, rope"


def _inputs(b: int, s: int, whole: bool, device: str) -> dict[str, Tensor]:
    x = separate_heads(b, s, device)
    weights = {
        f"w{n}": torch.randn(1, x[n].shape[1] if whole else 1, 1, D, device=device, dtype=BF16)
        for n in "qk"
    }
    return {n: x[n] for n in "qk"} | weights | {"freqs": half_angles(s, device)}


def forward(
    b: int,
    s: int,
    *,
    norm_first: bool = True,
    whole: bool = False,
    training: bool = False,
    device: str = "cuda",
) -> Work:
    """Norm, then rope, or rope, then norm.

    whole: over all heads of a token together.  training: with inv_variance, for the gradient.
    """
    inputs = _inputs(b, s, whole, device)
    phase = getattr(rg.norm_forward_phase, "TRAINING" if training else "INFERENCE")

    def record(g: rg.pygraph, t: Handles) -> None:
        for n in "qk":
            x = t[n] if norm_first else g.rope(t[n], t["freqs"], half_width=True)
            y, inverse = g.rmsnorm(phase, x, t[f"w{n}"], epsilon=EPSILON)
            assert y is not None
            out = g.rope(y, t["freqs"], half_width=True) if norm_first else y
            out.set_output(True).set_name(f"{n}_out").set_stride(inputs[n].stride())
            if inverse is not None:
                inverse.set_output(True).set_name(f"{n}_inv_variance")

    return Work("norm and rope", inputs, record)


def backward(
    b: int, s: int, *, norm_first: bool = True, whole: bool = False, device: str = "cuda"
) -> Work:  # fmt: skip
    """The gradients of Q and K and of the weights."""
    inputs = _inputs(b, s, whole, device)
    grads = separate_heads(b, s, device)
    for n in "qk":
        squares = inputs[n].float().square().mean((1, 3) if whole else 3, keepdim=True)
        inputs |= {f"d{n}_out": grads[n], f"{n}_inv_variance": (squares + EPSILON).rsqrt()}

    def record(g: rg.pygraph, t: Handles) -> None:
        for n in "qk":
            grad, x, f = t[f"d{n}_out"], t[n], t["freqs"]
            if norm_first:
                grad = g.rope_backward(grad, f, half_width=True)
            else:
                x = g.rope(x, f, half_width=True)
            dx, dw, _ = g.rmsnorm_backward(grad, x, t[f"w{n}"], t[f"{n}_inv_variance"])
            assert dx is not None
            assert dw is not None
            dx = dx if norm_first else g.rope_backward(dx, f, half_width=True)
            dx.set_output(True).set_name(f"d{n}").set_stride(inputs[n].stride())
            dw.set_output(True).set_name(f"dw{n}")

    return Work("gradients of norm and rope", inputs, record)


def rows(b: int = 2, s: int = 8192, long: int = 131_072, device: str = "cuda") -> list[Row]:
    """Forward beside rope alone and beside a copy, the gradients beside a copy."""
    size = f"b{b} s{s}"
    found = _forwards(b, s, (True, False), device) + _forwards(1, long, (True,), device)
    whole = {
        "ours": forward(b, s, whole=True, training=True, device=device),
        "rope alone": dense(b, s, device=device),
    }
    found.append(ratio(f"{ALL_HEADS}, inv_variance written, beside rope, {size}", whole, None))
    for norm_first in (True, False):
        name = f"gradients of {_order(norm_first)} and of the weight, {size}"
        found.append(beside_copy(name, backward(b, s, norm_first=norm_first, device=device)))
    work = backward(b, s, whole=True, device=device)
    found.append(beside_copy(f"gradients of {ALL_HEADS} and of the weight, {size}", work, None))
    return found


def _forwards(b: int, s: int, orders: Sequence[bool], device: str) -> list[Row]:
    """For inference and for training."""
    found: list[Row] = []
    rope = dense(b, s, device=device)
    for norm_first in orders:
        for training in (False, True):
            work = forward(b, s, norm_first=norm_first, training=training, device=device)
            name = f"{_order(norm_first)}{', inv_variance written' if training else ''}"
            works = {"ours": work, "rope alone": rope}
            found.append(ratio(f"{name}, beside rope, b{b} s{s}", works, AS_ROPE))
            if training:
                found.append(beside_copy(f"{name}, b{b} s{s}", work))
    return found


def _order(norm_first: bool) -> str:
    return "norm, rope" if norm_first else "rope, norm"
