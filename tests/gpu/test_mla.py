"""mla_kv_rope on a GPU: the cases of the CPU tests, large sizes, the graph, capture."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.engines.cuda_rope.engine import CudaRope
from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.ir.ops import MXFP8_PORTS, MlaKvRope, MlaKvRopeBackward
from ropegraph.lowering.engine import Device
from tests.engines import mxfp8_by_hand as by_hand
from tests.engines.mla_cases import edges, inputs
from tests.gpu.attention import here
from tests.gpu.test_cuda_rope import build, on_gpu, stream
from tests.kernels.cases import Case, offset_by
from tests.kernels.mla_cases import (
    BF16,
    F32,
    LAYOUTS,
    backward,
    case,
    check,
    expected,
    forward,
    mxfp8,
    outputs,
)
from tests.kernels.test_mla_host import KINDS, SIZES, TYPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def needs_cupy() -> None:
    pytest.importorskip("cupy")


def run_and_check(what: str, given: Case, want: dict[str, Tensor] | None = None) -> None:
    want = expected(given) if want is None else want
    there = on_gpu(given)
    build(given)(there.env, stream())
    torch.cuda.synchronize()
    check(Case(given.step, [t.cpu() for t in there.env]), want, what)


@pytest.mark.parametrize("make", [forward, backward])
@pytest.mark.parametrize("kind", KINDS)
def test_key_value_and_gradients(make: Any, kind: str) -> None:
    rng = random.Random(kind)
    for i, size in enumerate(SIZES):
        for types in (TYPES[i % 6], TYPES[(i + 3) % 6]):
            run_and_check(*make(rng, size, *types, kind))


@pytest.mark.parametrize("kind", ["plain", "strides", "misaligned", "some outputs"])
@pytest.mark.parametrize("table", [BF16, F32])
def test_every_byte_of_mxfp8(kind: str, table: torch.dtype) -> None:
    rng = random.Random(kind)
    sizes = [
        (1, 5, 64, 128, 128, 64), (2, 2, 32, 32, 96, 32), (1, 3, 32, 64, 32, 96),
        (1, 2, 64, 48, 32, 16), (2, 1, 32, 0, 32, 64), (1, 2, 32, 64, 0, 32),
    ]  # fmt: skip
    for size in sizes:
        run_and_check(*mxfp8(rng, size, table, kind, rng.choice(LAYOUTS)))


@pytest.mark.parametrize("table", [BF16, F32])
@pytest.mark.parametrize("shift", [0, 1])
def test_bytes_by_hand(table: torch.dtype, shift: int) -> None:
    """Against integers and fractions; shift takes the kernel for any base."""
    given = edges(inputs(1, 2, 64, 32, 64, 32, BF16, table), 32)
    want = by_hand.mla(**given, nope=32)
    op = MlaKvRope(32, "mxfp8")
    written = outputs(op, given, random.Random(0), ("bshd",))
    moved = given | {"kv": offset_by(given["kv"], shift)}
    run_and_check(f"by hand, {table}, {shift}", case(op, moved, written), want)


def test_the_torch_executor_has_the_same_bytes_on_the_device() -> None:
    given = edges(inputs(2, 4, 64, 128, 128, 64, BF16, BF16), 128)
    for op in (MlaKvRope(128, "mxfp8"), MlaKvRope(128)):
        near = case(op, given, outputs(op, given, random.Random(0), ("bshd",)))
        want = expected(near, "torch")
        there = on_gpu(near)
        TorchExecutor().compile(near.step, Device("cuda"))(there.env, stream())
        for port in near.written:
            got = there.at(port).cpu()
            exact = want[port] if port in MXFP8_PORTS else want[port].to(BF16)
            assert ((got == exact) | (got.isnan() & exact.isnan())).all(), port


def test_every_bf16_number_is_quantized_alike() -> None:
    """Each as the largest of a block: cvt.satfinite against the arithmetic of the reference."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16)
    given = inputs(1, 16, 64, 64, 64, 64)
    given["kv"] = every.view(1, 16, 64, 64).repeat(1, 1, 1, 2)
    op = MlaKvRope(64, "mxfp8")
    run_and_check("every number", case(op, given, outputs(op, given, random.Random(0))))


def sbhd(b: int, h: int, s: int, d: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(s, b, h, d, device="cuda", dtype=dtype).permute(1, 2, 0, 3)


def large(b: int, h: int, s: int, nope: int, v: int, r: int) -> dict[str, Tensor]:
    angle = torch.randn(s, 1, 1, r, device="cuda")
    return {
        "kv": sbhd(b, h, s, nope + v),
        "k_rope": sbhd(b, 1, s, r),
        "cos": angle.cos(),
        "sin": angle.sin(),
    }


def run_engine(engine: Any, op: Any, given: dict[str, Tensor], written: dict[str, Tensor]) -> None:
    one = case(op, given, written)
    engine.compile(one.step, here())(one.env, stream())


@pytest.mark.parametrize(
    "size", [(65_536, 1, 1, 8, 8, 16), (1, 65_537, 2, 8, 8, 16), (1, 1, 65_537, 8, 8, 16)]
)
def test_65536_along_an_axis(size: tuple[int, ...]) -> None:
    """C14: the kernel against torch on the same device."""
    b, h, s, nope, v, r = size
    given = large(*size)
    made = [{"key": sbhd(b, h, s, nope + r), "value": sbhd(b, h, s, v)} for _ in range(2)]
    for engine, written in zip((CudaRope(), TorchExecutor()), made, strict=True):
        run_engine(engine, MlaKvRope(nope), given, written)
    for port in ("key", "value"):
        assert torch.equal(made[0][port], made[1][port])
    grads = {"dKey": made[0]["key"], "dValue": made[0]["value"], "cos": given["cos"],
             "sin": given["sin"]}  # fmt: skip
    back = [{"dKV": sbhd(b, h, s, nope + v), "dK_rope": sbhd(b, 1, s, r)} for _ in range(2)]
    for engine, written in zip((CudaRope(), TorchExecutor()), back, strict=True):
        run_engine(engine, MlaKvRopeBackward(nope, v), grads, written)
    assert torch.equal(back[0]["dKV"], back[1]["dKV"])
    size_of_it = back[1]["dK_rope"].abs().max()
    torch.testing.assert_close(
        back[0]["dK_rope"], back[1]["dK_rope"], rtol=0, atol=float(1e-2 * size_of_it)
    )


def test_offsets_past_2_to_the_31() -> None:
    """C14: batch entries 2^30 elements apart."""
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GB")
    store = torch.zeros(2**31 + 4096, device="cuda", dtype=BF16)
    given = large(3, 1, 32, 32, 32, 32)
    far = store.as_strided((3, 1, 32, 64), (2**30, 64, 64, 1))
    far.copy_(given["kv"])
    made = [{"key": sbhd(3, 1, 32, 64), "value": sbhd(3, 1, 32, 32)} for _ in range(2)]
    run_engine(CudaRope(), MlaKvRope(32), given | {"kv": far}, made[0])
    run_engine(TorchExecutor(), MlaKvRope(32), given, made[1])
    for port in ("key", "value"):
        assert torch.equal(made[0][port], made[1][port])


@pytest.mark.parametrize("quantize", [None, "mxfp8"])
def test_a_graph_and_its_replay(quantize: str | None) -> None:
    """The default engine, one launch, the same again from a capture and on new numbers."""
    given = large(2, 4, 64, 128, 128, 64)
    g = rg.pygraph()
    made = g.mla_kv_rope(**given, quantize=quantize)
    handles = made if quantize is None else [*made[0], *made[1]]
    for handle in handles:
        handle.set_output(True)
    g.build()
    assert [step.engine for step in g.plan.steps] == ["cuda.rope"]
    pack = {
        t: torch.empty_strided(
            t.get_dim(), t.get_stride(), device="cuda",
            dtype=getattr(torch, t.get_data_type().torch_name),
        )
        for t in handles
    }  # fmt: skip
    for _ in range(3):
        given["kv"].normal_()
        g.execute(pack)
        assert g.verify(pack).is_ok


def step_through_attention(
    given: dict[str, Tensor], d_o: Tensor, engines: tuple[str, ...] | None
) -> tuple[dict[str, Tensor], set[str]]:
    """O and the gradients of kv and k_rope, and the engines that ran."""
    g = rg.pygraph(io_data_type=BF16, engines=engines)
    t = {name: g.tensor_like(x, name=name) for name, x in given.items()}
    key, value = g.mla_kv_rope(*(t[n] for n in ("kv", "k_rope", "cos", "sin")), name="mla")
    o, _ = g.sdpa(t["q"], key, value, attn_scale=192**-0.5, use_causal_mask=True, name="attn")
    o.set_output(True).set_name("o").set_stride(d_o.stride())
    back = g.backward_graph("o", ["kv", "k_rope"])
    g.build()
    back.build()

    def buffer(handle: Any) -> Tensor:
        dtype = getattr(torch, handle.get_data_type().torch_name)
        return torch.empty_strided(
            handle.get_dim(), handle.get_stride(), dtype=dtype, device="cuda"
        ).fill_(torch.nan)

    pool = given | {x.get_name(): buffer(x) for x in g.tensors if x.spec.is_saved or x is o}
    g.execute({x: pool[x.get_name()] for x in g.tensors if x.get_name() in pool})
    grads = {name: buffer(back.find_tensor(name)) for name in ("dkv", "dk_rope")}
    back.execute({name: pool[name] for name in back.saved} | {"do": d_o} | grads)
    ran = {step.engine for graph in (g, back) for step in graph.plan.steps}
    return {"o": pool["o"], **grads}, ran


def test_a_training_step_through_attention() -> None:
    b, h, s, nope, v, r = 2, 4, 256, 128, 128, 64
    given = large(b, h, s, nope, v, r) | {"q": sbhd(b, h, s, nope + r)}
    d_o = sbhd(b, h, s, v)
    got, ran = step_through_attention(given, d_o, None)
    want, _ = step_through_attention(given, d_o, ("torch",))
    assert "cuda.rope" in ran
    for name, x in want.items():
        error = (got[name].float() - x.float()).norm() / x.float().norm()
        assert error < 1.5e-2, f"{name}: {error}"
