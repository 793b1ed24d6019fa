"""Steps of mla_kv_rope with their tensors, what must come out of them, and the comparison."""

import random

import torch
from torch import Tensor

from ropegraph.engines.reference import Reference
from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.ir.graph import Node, Value
from ropegraph.ir.ops import MXFP8_PORTS, MlaKvRope, MlaKvRopeBackward
from ropegraph.ir.shapes import infer
from ropegraph.lowering.engine import Device, Step
from ropegraph.testing.inputs import Layout, normal, placed, poisoned
from tests.engines.mla_cases import edges, inputs
from tests.kernels.cases import Case, offset_by, value_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BYTES = torch.uint8
LAYOUTS: tuple[Layout, ...] = ("bhsd", "bshd", "packed_qkv", "gapped", "odd_size_1")
Op = MlaKvRope | MlaKvRopeBackward


def case(op: Op, given: dict[str, Tensor], written: dict[str, Tensor]) -> Case:
    """A step that reads ``given`` and writes ``written``."""
    values: dict[str, Value] = {p: value_of(p, t) for p, t in (given | written).items()}
    slots = {name: i for i, name in enumerate(values)}
    node = Node("mla", op, {p: p for p in given}, {p: p for p in written})
    return Case(Step(node, values, "cuda.rope", slots), [*given.values(), *written.values()])


def outputs(
    op: Op, given: dict[str, Tensor], rng: random.Random, layouts: tuple[Layout, ...] = LAYOUTS
) -> dict[str, Tensor]:
    """A poisoned buffer for each output."""
    dims = infer("mla", op, {port: tuple(t.shape) for port, t in given.items()})
    dtype = next(iter(given.values())).dtype
    if isinstance(op, MlaKvRope) and op.quantize:
        return {port: filled(dim, rng.choice(layouts)) for port, dim in dims.items()}
    return {port: poisoned(dim, dtype, rng.choice(layouts)) for port, dim in dims.items()}


def filled(dim: tuple[int, ...], layout: Layout) -> Tensor:
    """Bytes of 0xa5, gaps included."""
    like = poisoned(dim, BF16, layout)
    store = torch.full((max(like.untyped_storage().nbytes() // 2, 1),), 0xA5, dtype=BYTES)
    return store.as_strided(like.shape, like.stride())


def tables(given: dict[str, Tensor], rng: random.Random, chance: float = 0.2) -> dict[str, Tensor]:
    """The tables in rows with a gap behind, or column by column."""
    found = dict(given)
    for port in ("cos", "sin"):
        rows, _, _, r = given[port].shape
        wide = torch.full((rows, 1, 1, r + 16), torch.nan, dtype=given[port].dtype)
        if rng.random() < chance:
            wide = torch.full((r + 2, 1, 1, rows), torch.nan, dtype=given[port].dtype)
            wide = wide.transpose(0, 3)
        wide[..., :r] = given[port]
        found[port] = wide[..., :r]
    return found


def forward(rng: random.Random, size: tuple[int, ...], dtype: torch.dtype, table: torch.dtype,
            kind: str) -> tuple[str, Case]:  # fmt: skip
    layout = "expanded" if kind == "expanded" else rng.choice(LAYOUTS)
    given = tables(inputs(*size, dtype, table, layout, seed=rng.randrange(1000)), rng)
    op = MlaKvRope(size[3])
    written = outputs(op, given, rng)
    if kind == "misaligned":
        port = rng.choice(("kv", "k_rope", "cos"))
        given[port] = offset_by(given[port], 1)
    if kind == "one output":
        del written[rng.choice(("key", "value"))]
    return f"forward {kind} {size} {dtype} {table}", case(op, given, written)


def backward(rng: random.Random, size: tuple[int, ...], dtype: torch.dtype, table: torch.dtype,
             kind: str) -> tuple[str, Case]:  # fmt: skip
    b, h, s, nope, v, r = size
    tensors = tables(inputs(*size, dtype, table), rng)
    layout = "expanded" if kind == "expanded" else rng.choice(LAYOUTS)
    given = {
        "dKey": placed(normal((b, h, s, nope + r), dtype, seed=rng.randrange(1000)), layout),
        "dValue": placed(normal((b, h, s, v), dtype, seed=rng.randrange(1000)), layout),
        "cos": tensors["cos"],
        "sin": tensors["sin"],
    }
    op = MlaKvRopeBackward(nope, v)
    written = outputs(op, given, rng)
    if kind == "misaligned":
        given["dKey"] = offset_by(given["dKey"], 1)
    if kind == "one output":
        del written[rng.choice(("dKV", "dK_rope"))]
        del given[rng.choice(("dKey", "dValue"))]
    return f"backward {kind} {size} {dtype} {table}", case(op, given, written)


def mxfp8(rng: random.Random, size: tuple[int, ...], table: torch.dtype, kind: str,
          layout: Layout = "bshd") -> tuple[str, Case]:  # fmt: skip
    nope = size[3]
    given = inputs(*size, BF16, table, layout, seed=rng.randrange(1000))
    given = edges(given, nope) if nope else given
    given = tables(given, rng, 0.5 if kind == "strides" else 0.0)
    op = MlaKvRope(nope, "mxfp8")
    written = outputs(op, given, rng, ("bshd",) if kind == "plain" else LAYOUTS)
    if kind == "misaligned":
        written["key_row"] = offset_bytes(written["key_row"])
    if kind == "some outputs":
        written = {p: t for p, t in written.items() if p in rng.sample(MXFP8_PORTS, 4)}
    return f"mxfp8 {kind} {size} {table} {layout}", case(op, given, written)


def offset_bytes(tensor: Tensor) -> Tensor:
    size = tensor.untyped_storage().nbytes()
    store = torch.full((size + 1,), 0xA5, dtype=BYTES)
    return store.as_strided(tensor.shape, tensor.stride(), 1)


def expected(given: Case, engine: str = "reference") -> dict[str, Tensor]:
    """What an engine writes, in fp64 (MXFP8: bytes), from the same inputs."""
    is_bytes = given.written[0] in MXFP8_PORTS
    made = {
        port: torch.full(given.at(port).shape, 0 if is_bytes else torch.nan,
                         dtype=BYTES if is_bytes else torch.float64)
        for port in given.written
    }  # fmt: skip
    env = [made.get(name, given.env[slot]) for name, slot in given.step.slots.items()]
    executor = Reference() if engine == "reference" else TorchExecutor()
    executor.compile(given.step, Device())(env, 0)
    return made


def check(given: Case, want: dict[str, Tensor], what: str) -> None:
    """Bytes and copied channels equal; sums and products within the roundings of the type."""
    for port, exact in want.items():
        got = given.at(port)
        if port in MXFP8_PORTS:
            is_right = got == exact
        else:
            a = got.double()
            finite = exact[exact.isfinite()].abs()
            size = float(finite.max()) if finite.numel() else 0.0
            eps = {BF16: 1.2e-2, F16: 1e-3, F32: 4e-7}[got.dtype]
            if port in ("value", "dKV"):
                eps = 0.0
            is_right = (
                (a == exact) | (a.isnan() & exact.isnan()) | ((a - exact).abs() <= eps * size)
            )
        if not is_right.all():
            place = tuple(int(i) for i in (~is_right).nonzero()[0])
            raise AssertionError(
                f"{what}: {int((~is_right).sum())} of {is_right.numel()} elements of {port} are "
                f"off; at {list(place)} {got[place].item()!r} instead of {exact[place].item()!r}"
            )
