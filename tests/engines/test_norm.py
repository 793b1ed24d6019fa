"""rmsnorm and its gradients, alone and fused, on torch and the reference: fp64 from the formula."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.engines.reference import Reference
from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.ir.ops import (
    NormRope,
    NormRopeBackward,
    NormRopePair,
    RmsNorm,
    RmsNormBackward,
    Rope,
    RopeBackward,
)
from ropegraph.testing.budget import assert_within, rounding
from ropegraph.testing.inputs import LAYOUTS, Layout, normal, placed, poisoned
from ropegraph.testing.oracle import gradients, leaf
from ropegraph.testing.oracle import rope as rotated
from tests.engines.steps import run

ENGINES = (TorchExecutor(), Reference())
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DIM = (2, 3, 5, 6)
ANGLES = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))


def normed(x: Tensor, w: Tensor, epsilon: float, centred: bool = False) -> tuple[Tensor, Tensor]:
    """By hand, and so that autograd goes through it."""
    axes = (1, 3) if w.shape[1] > 1 else (3,)
    inverse = (x.double().pow(2).mean(axes, keepdim=True) + epsilon).pow(-0.5)
    return x.double() * inverse * (w.double() + float(centred)), inverse


def turned(x: Tensor) -> Tensor:
    return rotated(x, ANGLES, rope_offset=1, output_scale=0.6, attention_factor=1.2)


ROTATION: dict[str, Any] = {
    "rope_dim": 4, "rope_offset": 1, "output_scale": 0.6, "attention_factor": 1.2,
    "half_width": True,
}  # fmt: skip


def weight(whole: bool, dtype: torch.dtype) -> Tensor:
    return (1 + 0.3 * normal((1, 3 if whole else 1, 1, 6), seed=5)).to(dtype)


def close(got: Tensor, want: Tensor, what: str = "") -> None:
    wide = torch.finfo(got.dtype).eps < 1e-10
    units = 1e-12 if wide else 3e-6
    size = float(want.detach().abs().max()) if want.numel() else 0.0
    assert_within(got, want.detach(), rounding(want, got.dtype) * (1 + 1e-6) + units * size, what)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_gradients(engine: Any, whole: bool, dtype: torch.dtype):
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for i, layout in enumerate(LAYOUTS):
        x, grad = (placed(normal(DIM, dtype, seed=s), layout) for s in (1, 2))
        w, epsilon, centred = weight(whole, wide if i % 2 else dtype), (1e-6, 0.3)[i % 2], i == 2
        a, b = leaf(x), leaf(w)
        want, inverse = normed(a, b, epsilon, centred)
        found = torch.full_like(inverse, torch.nan, dtype=wide)
        got = run(
            RmsNorm(centred, compute_of(dtype), epsilon), {"input": x, "scale": w},
            {"Y": poisoned(DIM, dtype, layout if layout != "expanded" else "bhsd"),
             "inv_variance": found}, engine,
        )  # fmt: skip
        close(got["Y"], want, layout)
        close(got["inv_variance"], inverse, layout)
        dx, dw = gradients(want, (a, b), grad)
        ports = {"grad": grad, "input": x, "scale": w, "inv_variance": found}
        outs = {"DX": poisoned(DIM, dtype), "Dscale": torch.full_like(w, torch.nan)}
        got = run(RmsNormBackward(centred, compute_of(dtype)), ports, outs, engine)
        # inv_variance came in fp32, and so a few of its units go out.
        close(got["DX"], dx, layout)
        close(got["Dscale"], dw, layout)


def compute_of(dtype: torch.dtype) -> Any:
    from ropegraph.dtypes import DType

    return DType.DOUBLE if dtype is torch.float64 else DType.FLOAT


def fused(norm_first: bool, whole: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Inputs, the ops, and what they should give."""
    x, grad, w = normal(DIM, dtype, "bshd", 3), normal(DIM, dtype, seed=4), weight(whole, dtype)
    a, b = leaf(x), leaf(w)
    if norm_first:
        made, inverse = normed(a, b, 1e-3)
        want = turned(made)
    else:
        want, inverse = normed(turned(a), b, 1e-3)
    dx, dw = gradients(want, (a, b), grad)
    kind = compute_of(dtype)
    freqs = ANGLES.reshape(5, 1, 1, 2)
    names = ("norm", "rope")
    forward = NormRope(
        RmsNorm(False, kind, 1e-3), Rope(**ROTATION, compute=kind), norm_first, names
    )
    back = NormRopeBackward(
        RmsNormBackward(False, kind), RopeBackward(**ROTATION, compute=kind), norm_first, names
    )
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    inverse = inverse.detach().to(wide)
    ins = {"input": x, "scale": w, "freqs": freqs}
    return {
        "forward": (forward, ins, {"output": want, "inv_variance": inverse}),
        "backward": (
            back,
            {"dY": grad, "inv_variance": inverse, **ins},
            {"dX": dx, "Dscale": dw},
        ),
    }


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_fused(engine: Any, dtype: torch.dtype, norm_first: bool, whole: bool):
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for op, ins, wants in fused(norm_first, whole, dtype).values():
        outs = {
            port: torch.full_like(want, torch.nan, dtype=wide if port == "inv_variance" else dtype)
            for port, want in wants.items()
        }
        got = run(op, ins, outs, engine)
        for port, want in wants.items():
            close(got[port], want, port)
        if "Dscale" in outs:
            alone = run(op, ins, {"Dscale": torch.full_like(outs["Dscale"], torch.nan)}, engine)
            assert torch.equal(alone["Dscale"], got["Dscale"])


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_pair(engine: Any):
    both = fused(True, False, torch.float32), fused(True, True, torch.float32)
    for way in ("forward", "backward"):
        parts = tuple(each[way][0] for each in both)
        ins = {f"{p}{i}": t for i, each in enumerate(both) for p, t in each[way][1].items()}
        wants = {f"{p}{i}": t for i, each in enumerate(both) for p, t in each[way][2].items()}
        outs = {p: torch.full_like(t, torch.nan, dtype=torch.float32) for p, t in wants.items()}
        got = run(NormRopePair(parts, ("a", "b")), ins, outs, engine)
        for port, want in wants.items():
            close(got[port], want, port)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_square_overflows_and_zeros_stay_zeros(dtype: torch.dtype):
    largest = float(torch.finfo(dtype).max)
    large = {torch.float16: 65504.0, torch.float64: 1e300}.get(dtype, 1e38)
    x = torch.tensor([large, -large, large, large], dtype=dtype).reshape(1, 1, 1, 4)
    x = torch.cat([x, torch.zeros_like(x), x * 0 + min(largest, 3.0)], 2)
    w = torch.tensor([1.0, 2, 3, 4], dtype=dtype).reshape(1, 1, 1, 4)
    outs = {"Y": poisoned(x.shape, dtype)}
    got = run(RmsNorm(compute=compute_of(dtype)), {"input": x, "scale": w}, outs, TorchExecutor())
    want = torch.tensor([[1.0, -2, 3, 4], [0, 0, 0, 0], [1, 2, 3, 4]], dtype=torch.float64)
    torch.testing.assert_close(got["Y"].double()[0, 0], want, rtol=1e-6, atol=0)


def test_tiny_rows_count_where_epsilon_is_zero():
    x = torch.full((1, 1, 1, 4), 1e-30)
    outs = {"Y": poisoned(x.shape), "inv_variance": torch.full((1, 1, 1, 1), torch.nan)}
    got = run(RmsNorm(epsilon=0.0), {"input": x, "scale": torch.ones(1, 1, 1, 4)}, outs, ENGINES[0])
    torch.testing.assert_close(got["Y"], torch.ones_like(x))
    torch.testing.assert_close(got["inv_variance"], torch.full((1, 1, 1, 1), 1e30))


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("dim", [(0, 3, 5, 6), (2, 3, 0, 6), (2, 3, 5, 0)])
def test_nothing_in_gives_nothing_out_and_a_zero_gradient(engine: Any, dim: tuple[int, ...]):
    x, w = torch.empty(dim), torch.ones(1, 1, 1, dim[3])
    inverse = torch.ones(*dim[:3], 1)
    got = run(
        RmsNorm(), {"input": x, "scale": w}, {"Y": torch.empty(dim)}, engine
    )  # fmt: skip
    assert got["Y"].shape == x.shape
    ports = {"grad": x, "input": x, "scale": w, "inv_variance": inverse}
    outs = {"DX": torch.empty(dim), "Dscale": torch.full_like(w, torch.nan)}
    assert not run(RmsNormBackward(), ports, outs, engine)["Dscale"].any()


def test_a_gradient_of_one_stored_element():
    """C11: what autograd hands over after a sum."""
    x, w = normal(DIM), weight(False, torch.float32)
    _, inverse = normed(x, w, 1e-6)
    dense = torch.ones(DIM)
    ports = {"input": x, "scale": w, "inv_variance": inverse.float()}
    outs = {"DX": poisoned(DIM), "Dscale": poisoned((1, 1, 1, 6))}
    want = run(RmsNormBackward(), {"grad": dense, **ports}, dict(outs), ENGINES[0])
    want = {p: t.clone() for p, t in want.items()}
    one = torch.ones(1, 1, 1, 1).expand(DIM)
    got = run(RmsNormBackward(), {"grad": one, **ports}, outs, ENGINES[0])
    for port in want:
        assert torch.equal(got[port], want[port])


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("whole", [False, True])
def test_padding_without_a_gradient_poisons_nothing(engine: Any, whole: bool):
    """C18: NaN in rows that nothing comes back for is no part of the weight's gradient."""
    x, grad, w = normal(DIM, seed=1), normal(DIM, seed=2), weight(whole, torch.float32)
    x[:, :, 3], x[1, :, 4], grad[:, :, 3:] = torch.nan, torch.inf, 0
    _, inverse = normed(x, w, 1e-6)
    ports = {"grad": grad, "input": x, "scale": w, "inv_variance": inverse.float()}
    outs = {"DX": poisoned(DIM), "Dscale": torch.full_like(w, torch.nan)}
    got = run(RmsNormBackward(), ports, outs, engine)
    a, b = leaf(x[:, :, :3]), leaf(w)
    dx, dw = gradients(normed(a, b, 1e-6)[0], (a, b), grad[:, :, :3])
    close(got["DX"][:, :, :3], dx)
    assert not got["DX"][:, :, 3:].any()
    close(got["Dscale"], dw)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_a_gradient_of_one_channel_is_that_of_a_row(engine: Any):
    """A zero among others is no padding: NaN in x then comes through."""
    x, grad = normal(DIM, seed=1), torch.zeros(DIM)
    x[0, 0, 0, 2] = torch.nan
    grad[0, 0, 0, 1] = 1.0
    w = weight(False, torch.float32)
    ports = {"grad": grad, "input": x, "scale": w, "inv_variance": normed(x, w, 1e-6)[1].float()}
    got = run(RmsNormBackward(), ports, {"DX": poisoned(DIM), "Dscale": poisoned(w.shape)}, engine)
    assert bool(got["DX"][0, 0, 0].isnan().all())
    assert bool(got["Dscale"][0, 0, 0, 1].isnan())
    assert not got["DX"][0, 1:].any()


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("norm_first", [True, False])
def test_rows_of_no_sequence_poison_nothing(engine: Any, norm_first: bool):
    """C18, in one launch with the rotation."""
    dim = (1, 3, 5, 6)
    x, grad, w = normal(dim, seed=1), normal(dim, seed=2), weight(False, torch.float32)
    x[:, :, 3:] = torch.nan
    # A rotation's adjoint makes zeros of whatever comes back; a norm knows of no sequences.
    grad[:, :, 3:] = torch.nan if norm_first else 0.0
    names = ("norm", "rope")
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    ins = {"input": x, "scale": w, "freqs": ANGLES.reshape(5, 1, 1, 2), "cu_seqlens": bounds}
    forward = NormRope(RmsNorm(), Rope(**ROTATION), norm_first, names)
    outs = {"output": poisoned(dim), "inv_variance": torch.full((1, 3, 5, 1), torch.nan)}
    inverse = run(forward, ins, outs, engine)["inv_variance"]
    back = NormRopeBackward(RmsNormBackward(), RopeBackward(**ROTATION), norm_first, names)
    outs = {"dX": poisoned(dim), "Dscale": torch.full_like(w, torch.nan)}
    got = run(back, {"dY": grad, "inv_variance": inverse, **ins}, outs, engine)
    a, b = leaf(x[:, :, :3]), leaf(w)

    def turned_rows(t: Tensor) -> Tensor:
        return rotated(t, ANGLES[:3], rope_offset=1, output_scale=0.6, attention_factor=1.2)

    made = turned_rows(normed(a, b, 1e-6)[0]) if norm_first else normed(turned_rows(a), b, 1e-6)[0]
    dx, dw = gradients(made, (a, b), grad[:, :, :3])
    close(got["dX"][:, :, :3], dx)
    assert not got["dX"][:, :, 3:].any()
    close(got["Dscale"], dw)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_fused_adjoint(layout: Layout):
    """<dy, J v> = <J^T dy, v> with J by differences of the reference."""
    op, ins, _ = fused(True, False, torch.float64)["forward"]
    back, grads, _ = fused(True, False, torch.float64)["backward"]
    v = normal(DIM, torch.float64, layout, 9)
    step = 1e-6

    def at(x: Tensor) -> Tensor:
        return run(op, {**ins, "input": x}, ["output"])["output"].clone()

    change = (at(ins["input"] + step * v) - at(ins["input"] - step * v)) / (2 * step)
    dx = run(back, grads, ["dX"])["dX"]
    torch.testing.assert_close((grads["dY"] * change).sum(), (dx * v).sum(), rtol=1e-7, atol=0)
