"""The kernels on a GPU: the cases of the CPU tests, large sizes, streams, threads, graphs."""

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.engines.cuda_rope.engine import CudaRope
from ropegraph.ir.ops import Rope
from ropegraph.lowering.engine import Executable
from tests.gpu.attention import here
from tests.kernels import test_host as plans
from tests.kernels.cases import Case, case, check, expected

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def needs_cupy() -> None:
    pytest.importorskip("cupy")


def build(given: Case) -> Any:
    engine = CudaRope()
    assert engine.why_not(given.step, here()) == ()
    return engine.compile(given.step, here())


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def on_gpu(given: Case) -> Case:
    """The same tensors on the GPU, storages and strides kept."""
    stores: dict[int, Tensor] = {}

    def moved(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in stores:
            flat = torch.tensor([], dtype=torch.uint8).set_(storage)
            stores[storage.data_ptr()] = flat.cuda()
        store = stores[storage.data_ptr()].view(t.dtype)
        return store.as_strided(t.shape, t.stride(), t.storage_offset())

    return Case(given.step, [moved(t) for t in given.env])


def run_and_check(what: str, given: Case) -> Any:
    """One case of the CPU tests, on the GPU, against the same fp64 reference."""
    want = expected(given)
    there = on_gpu(given)
    exe = build(given)
    exe(there.env, stream())
    torch.cuda.synchronize()
    check(Case(given.step, [t.cpu() for t in there.env]), want, what)
    return exe


@pytest.mark.parametrize("kind", ["plain", "expanded", "misaligned", "in place"])
def test_one_rotation(kind: str) -> None:
    rng = random.Random(kind)
    for variant in range(0, 36, 3):
        run_and_check(*plans.dense(rng, variant, kind))


@pytest.mark.parametrize("kind", ["joined", "apart", "misaligned"])
def test_two_rotations_in_one_launch(kind: str) -> None:
    rng = random.Random(kind)
    for variant in range(4):
        run_and_check(*plans.pair(rng, variant, kind))


def test_sequences_at_offsets() -> None:
    rng = random.Random(1)
    for starts in ([0, 0, 2, 2, 5, 5], [2, 5, 9, 10], [0, 11, 12], list(range(0, 60, 3))):
        exe = run_and_check(f"ragged {starts}", plans.ragged(rng, starts))
        assert exe.faults() == ()
    run_and_check("off 16 bytes", plans.ragged(rng, [0, 3, 7], shift=1, extra=0))


def test_wrong_offsets_give_nan_and_a_flag() -> None:
    row, rng = 3 * 64, random.Random(2)
    for offsets in ([0, 4 * row, 2 * row, 6 * row], [-5, 2 * row, 9, 10**9], [0, 10**9, 3, 7]):
        given = plans.ragged(rng, [0, 2, 4, 6], extra=0)
        given.env[given.step.slots["offsets0"]].copy_(torch.tensor(offsets, dtype=torch.int32))
        exe, there = build(given), on_gpu(given)
        exe(there.env, stream())
        assert exe.faults()
        assert there.at("output").isnan().any()


def table(s: int, width: int) -> Tensor:
    half = torch.arange(width // 2, device="cuda", dtype=F32)
    positions = torch.arange(s, device="cuda", dtype=F32)
    angle = torch.outer(positions, 10000 ** (-2 * half / width))
    return torch.cat([angle, angle], -1)[:, None, None]


def simple(x: Tensor, y: Tensor | None = None) -> Case:
    y = torch.full_like(x, torch.nan) if y is None else y
    return case(Rope(x.shape[3], 0), input=x, freqs=table(x.shape[2], x.shape[3]), output=y)


def turned(x: Tensor, freqs: Tensor) -> Tensor:
    """The half-split rotation in fp64."""
    angle = freqs[: x.shape[2], 0, 0, : x.shape[-1] // 2].double()
    a, b = x.double().chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def is_close(got: Tensor, want: Tensor) -> bool:
    """Relative errors no larger than those of a rotation in fp32, rounded once."""
    error = float((got.double() - want).norm() / want.norm())
    return error < {BF16: 1.7e-3, F16: 2.2e-4, F32: 3e-7}[got.dtype]


def run(given: Case) -> Case:
    exe: Executable = build(given)
    exe(given.env, stream())
    return given


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_errors_are_those_of_a_rotation_in_fp32(dtype: torch.dtype) -> None:
    given = run(simple(torch.randn(2, 8, 4096, 128, device="cuda", dtype=dtype)))
    assert is_close(given.at("output"), turned(given.at("input"), given.at("freqs")))


@pytest.mark.parametrize("dim", [(65_536, 1, 1, 8), (1, 65_536, 1, 8), (1, 1, 65_536, 8)])
def test_65536_along_an_axis(dim: tuple[int, ...]) -> None:
    """C14."""
    given = run(simple(torch.randn(dim, device="cuda", dtype=BF16)))
    assert is_close(given.at("output"), turned(given.at("input"), given.at("freqs")))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("in_place", [False, True])
def test_offsets_past_2_to_the_31(axis: int, in_place: bool) -> None:
    """C14: a view with strides of 2^30 in a buffer of 4.3 GB."""
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GB")
    store = torch.zeros(2**31 + 64, device="cuda", dtype=BF16)
    dim = (3, 1, 1, 8) if axis == 0 else (1, 3, 1, 8)
    x = store.as_strided(dim, (2**30, 2**30, 8, 1)).normal_()
    before = x.clone()
    given = run(simple(x, x if in_place else None))
    assert is_close(given.at("output"), turned(before, given.at("freqs")))
    given = run(simple(before, x))
    assert is_close(x, turned(before, given.at("freqs")))


def test_a_side_stream_with_a_delayed_producer() -> None:
    """C33."""
    given = simple(torch.zeros(2, 4, 512, 128, device="cuda", dtype=BF16))
    exe, side = build(given), torch.cuda.Stream()
    fresh = torch.randn_like(given.at("input"))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        given.at("input").copy_(fresh)
        exe(given.env, stream())
    side.synchronize()
    assert is_close(given.at("output"), turned(fresh, given.at("freqs")))


def test_threads_that_never_touched_cuda() -> None:
    """C33: one executable, eight threads, none with a context of its own."""
    mine = [simple(torch.randn(2, 4, 512, 128, device="cuda", dtype=BF16)) for _ in range(8)]
    exe = build(mine[0])
    torch.cuda.synchronize()
    threads = [threading.Thread(target=exe, args=(given.env, 0)) for given in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for given in mine:
        assert is_close(given.at("output"), turned(given.at("input"), given.at("freqs")))


def test_a_captured_graph_replays_on_new_inputs() -> None:
    given = simple(torch.randn(2, 4, 512, 128, device="cuda", dtype=BF16))
    exe = build(given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exe(given.env, stream())
    fresh = torch.randn_like(given.at("input"))
    given.at("input").copy_(fresh)
    graph.replay()
    assert is_close(given.at("output"), turned(fresh, given.at("freqs")))
