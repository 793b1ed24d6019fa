"""Every source of angles by every way to give positions: forward, gradient and adjoint, in fp64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.dtypes import as_dtype
from ropegraph.engines.reference import Reference
from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.ir.graph import Node, Value
from ropegraph.ir.ops import Rope, RopeFreqsGrad, RopePair
from ropegraph.lowering.engine import Device, Engine, Step
from ropegraph.testing.inputs import normal, poisoned, strides
from tests.engines import rotations, steps
from tests.engines.rotations import F32, F64, POSITIONS, SOURCES, TABLES, Case, D, H, case

ENGINES: list[Engine] = [TorchExecutor(), Reference()]
engines = pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)


def turn(engine: Engine, c: Case, x: Tensor, out: Any = None) -> Tensor:
    outputs = ["output"] if out is None else {"output": out}
    return steps.run(c.attrs, {"input": x, **c.tensors}, outputs, engine)["output"]


def turn_back(engine: Engine, c: Case, dy: Tensor) -> Tensor:
    return steps.run(c.backward, {"dY": dy, **c.tensors}, ["dX"], engine)["dX"]


def data(c: Case, dtype: torch.dtype = F64, seed: int = 1, dead: float = torch.nan) -> Tensor:
    """Numbers in the rows of a sequence, NaN in those of none."""
    b, s = c.dead.shape
    x = normal((b, H, s, D), dtype, seed=seed)
    return torch.where(c.dead[:, None, :, None], torch.tensor(dead, dtype=dtype), x)


def check(engine: Engine, c: Case) -> None:
    x, dy = data(c, seed=1), data(c, seed=2)
    y, dx = turn(engine, c, x), turn_back(engine, c, dy)
    leaf = x.clone().requires_grad_()
    want = c.formula(leaf)
    (want_dx,) = torch.autograd.grad(want, leaf, dy.nan_to_num())
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(y, want.detach(), **close)
    torch.testing.assert_close(dx, want_dx, **close)
    assert not y.transpose(1, 2)[c.dead].any()
    assert not dx.transpose(1, 2)[c.dead].any()
    left, right = (dy.nan_to_num() * y).sum(), (dx * x.nan_to_num()).sum()
    torch.testing.assert_close(left, right, **close)


@engines
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_by_every_position(engine, source, positions):
    for layout in TABLES if source not in ("inv_freq", "exact") else ["half"]:
        for per_batch in (False, True):
            c = case(
                source, layout, POSITIONS[positions], per_batch, output_scale=0.7, inverse=per_batch
            )
            check(engine, c)


@engines
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("source", SOURCES)
def test_every_pairing_at_every_place(engine, source, read, written):
    pairing = {"interleaved": read, "interleaved_output": written, "attention_factor": 1.3}
    for layout in TABLES if source not in ("inv_freq", "exact") else ["half"]:
        for offset in (0, 2, 3):  # head, in between, tail
            for kind in ("ids", "packed, cp"):
                c = case(source, layout, POSITIONS[kind], rope_offset=offset, **pairing)
                check(engine, c)


# SBHD, BSHD, BHSD and [d, b, n, s], for what is read and for what is written.
ORDERS = {"sbhd": (2, 0, 1, 3), "bshd": (0, 2, 1, 3), "bhsd": (0, 1, 2, 3), "dbns": (3, 0, 1, 2)}


def laid_out(dim: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    packed = strides([dim[i] for i in order])
    return tuple(packed[order.index(axis)] for axis in range(4))


@pytest.mark.parametrize("written", ORDERS)
@pytest.mark.parametrize("read", ORDERS)
def test_every_memory_order(read, written):
    c = case("cos_sin", "half", POSITIONS["starts"], interleaved=True)
    x = data(c)
    want = c.formula(x)
    given = poisoned(x.shape, F64, stride=laid_out(tuple(x.shape), ORDERS[read])).copy_(x)
    out = poisoned(x.shape, F64, stride=laid_out(tuple(x.shape), ORDERS[written]))
    torch.testing.assert_close(turn(ENGINES[0], c, given, out), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("table", [torch.float16, torch.bfloat16, F32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32])
@pytest.mark.parametrize("source", SOURCES)
def test_every_dtype_is_rounded_once(source, dtype, table):
    c = case(source, "half", POSITIONS["packed, starts"], dtype=table, output_scale=0.3)
    for got, given, by in (
        (turn, data(c, dtype), c.formula),
        (turn_back, data(c, dtype), lambda x: adjoint(c, x)),
    ):
        want = by(given)
        info = torch.finfo(dtype)
        allowed = want.abs() * info.eps / 2 + info.smallest_normal * info.eps + 2e-6
        assert bool(((got(ENGINES[0], c, given).double() - want).abs() <= allowed).all())


def adjoint(c: Case, dy: Tensor) -> Tensor:
    leaf = torch.zeros(dy.shape, dtype=F64, requires_grad=True)
    (dx,) = torch.autograd.grad(c.formula(leaf), leaf, dy.double().nan_to_num())
    return dx


@engines
@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("layout", TABLES)
@pytest.mark.parametrize("positions", POSITIONS)
def test_the_gradient_of_freqs_gathers_where_a_row_was_read(engine, positions, layout, per_batch):
    c = case("freqs", layout, POSITIONS[positions], per_batch, output_scale=0.7, inverse=per_batch)
    x, dy = data(c, seed=1), data(c, seed=2)
    ports = {"input": x, "dY": dy, **c.tensors, "freqs": c.tensors["freqs"].double()}
    got = steps.run(RopeFreqsGrad(**vars(c.attrs)), ports, ["dfreqs"], engine)["dfreqs"]
    # The oracle: the angle of each lane and row as a leaf, then added up by hand.
    half = rotations.R // 2
    p = POSITIONS[positions]
    index = torch.tensor([[n or 0 for n in row] for row in p.rows])
    table = torch.zeros(got.shape, dtype=F64)
    columns = {
        "half": (range(half), range(half)),
        "first_half": (range(half), range(half)),
        "pairs": (range(0, 2 * half, 2), range(0, 2 * half, 2)),
        "full": (range(half), range(half, 2 * half)),
    }[layout]
    sign = -1.0 if c.attrs.inverse else 1.0
    for lane, own in enumerate(columns):
        grad = lane_gradient(c, x.nan_to_num(), dy.nan_to_num(), lane) * sign
        for i, row in enumerate(p.rows):
            for j in range(len(row)):
                if row[j] is not None:
                    table[index[i, j], i if per_batch else 0, 0, list(own)] += grad[i, j]
    torch.testing.assert_close(got, table, rtol=1e-12, atol=1e-12)


def lane_gradient(c: Case, x: Tensor, dy: Tensor, lane: int) -> Tensor:
    """[b, s, r/2]: by the angle of the first or second lane, heads summed."""
    sign = -1.0 if c.attrs.inverse else 1.0
    out = []
    read, written = (rotations.lanes(c.attrs, False) for _ in range(2))
    for i, ((r1, r2), places) in enumerate(zip(read, written, strict=True)):
        cos, sin = c.cos[lane][:, None, :, i], sign * c.sin[lane][:, None, :, i]
        x1, x2 = x[..., r1], x[..., r2]
        d = -(x1 * sin + x2 * cos) if lane == 0 else x1 * cos - x2 * sin
        out.append((dy[..., places[lane]] * d).sum(1))
    return c.attrs.output_scale * torch.stack(out, dim=2)


@engines
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_pair_is_two_rotations(engine, source, positions):
    c = case(source, "half", POSITIONS[positions])
    x = [data(c, seed=1), data(c, seed=2)[:, :1].contiguous()]
    inputs: dict[str, Tensor] = {}
    for i in range(2):
        inputs |= {f"input{i}": x[i]} | {f"{port}{i}": t for port, t in c.tensors.items()}
    got = steps.run(RopePair((c.attrs, c.attrs)), inputs, ["output0", "output1"], engine)
    for i in range(2):
        assert torch.equal(got[f"output{i}"], turn(engine, c, x[i]))


@pytest.mark.parametrize("positions", ["ids", "packed, starts"])
def test_rotation_in_place(positions):
    c = case("packed", "half", POSITIONS[positions], interleaved=True)
    x = data(c)
    want = turn(ENGINES[0], c, x)
    bound = {"x": x.clone(), **c.tensors}
    values = {n: Value(n, tuple(t.shape), t.stride(), as_dtype(t.dtype)) for n, t in bound.items()}
    slots = {n: i for i, n in enumerate(bound)}
    ports = {"input": "x", **{p: p for p in c.tensors}}
    step = Step(Node("turn", c.attrs, ports, {"output": "x"}), values, "torch", slots)
    ENGINES[0].compile(step, Device())(list(bound.values()), 0)
    assert torch.equal(bound["x"], want)


@engines
def test_channels_outside_are_copied_and_position_0_changes_nothing(engine):
    # C04
    x = torch.tensor([1.0, 2.0, torch.inf, torch.nan]).reshape(1, 1, 1, 4)
    attrs = Rope(2, 0, angles="inv_freq", half_width=True)
    ports = {"inv_freq": torch.tensor([1.0]), "position_ids": torch.tensor([[1]])}
    got = steps.run(attrs, {"input": x, **ports}, ["output"], engine)["output"]
    turned = torch.tensor([-1.1426, 1.9221])
    torch.testing.assert_close(got[0, 0, 0, :2], turned, atol=1e-4, rtol=0)
    assert torch.equal(got.view(torch.int32)[..., 2:], x.view(torch.int32)[..., 2:])
    x = torch.tensor([3.0, -0.0, 1e-40, 5.0]).reshape(1, 1, 1, 4)
    attrs, ports = replace(attrs, rope_dim=4), {"inv_freq": torch.tensor([1.0, 0.01])}
    assert torch.equal(steps.run(attrs, {"input": x, **ports}, ["output"], engine)["output"], x)
