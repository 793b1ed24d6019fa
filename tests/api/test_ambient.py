"""Whatever mode the caller is in, the bits are the same: autocast, default types, grad, threads."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

import ropegraph
from ropegraph import GraphError
from tests.ambient import default_dtype, matmul_precision
from tests.api.graphs import F16, F32, F64, X, attention, buffers, new, rotation, run

BF16 = torch.bfloat16


def everything(dtype: torch.dtype) -> ropegraph.pygraph:
    """Rotations, bias, ALiBi, softcap, sink, dropout, padding: all that makes constants."""
    g = new(io_data_type=dtype, fold="symmetric", fold_log2=True)
    q, k = g.tensor((2, 6, 5, 8), name="q"), g.tensor((2, 2, 7, 8), name="k")
    v, f = g.tensor((2, 3, 7, 4), name="v"), g.tensor((7, 1, 1, 8), data_type=F32, name="f")
    names = ("seq_len_q", "seq_len_kv")
    lengths = {n: g.tensor((2, 1, 1, 1), data_type=torch.int32, name=n) for n in names}
    o, stats = g.sdpa(
        g.rope(q, f, name="rope_q", attention_factor=1.1),
        g.rope(k, f, name="rope_k", attention_factor=1.1),
        v,
        attn_scale=0.3,
        bias=g.tensor((1, 6, 5, 7), data_type=F32, name="bias"),
        use_alibi_mask=True,
        softcap=20.0,
        use_padding_mask=True,
        diagonal_band_right_bound=1,
        diagonal_band_left_bound=6,
        sink_token=g.tensor((1, 6, 1, 1), data_type=F64 if dtype is F64 else F32, name="sink"),
        dropout=(0.25, 1234, 0),
        name="attn",
        **lengths,
    )
    o.set_output(True).set_name("o")
    stats.set_output(True).set_name("stats")
    return g


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


Mode = Callable[[], AbstractContextManager[Any]]
MODES: dict[str, Mode] = {
    "autocast to bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast("cpu", torch.float16),
    "default bf16": lambda: default_dtype(BF16),
    "default fp64": lambda: default_dtype(F64),
    "default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "deterministic": deterministic,
    "fast products": lambda: matmul_precision("medium"),
}
OUTSIDE = nullcontext


def forward_and_backward(dtype: torch.dtype, inside: Mode, built: Mode) -> dict[str, torch.Tensor]:
    """All results, where building happens in one mode and executing in another."""
    with built():
        g = everything(dtype)
        b = g.backward_graph(["o"], ["q", "k", "v", "bias", "sink"])
        g.build()
        b.build()
    pack = buffers(g)
    gradients = {**buffers(b), **{n: pack[n] for n in buffers(b) if n in pack}}
    with inside():
        g.execute(pack)
        b.execute(gradients)
    return {**pack, **gradients}


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["executed", "built"])
def test_the_bits_do_not_depend_on_the_mode(dtype: torch.dtype, mode: str, when: str):
    """C02."""
    want = forward_and_backward(dtype, OUTSIDE, OUTSIDE)
    modes = (MODES[mode], OUTSIDE) if when == "executed" else (OUTSIDE, MODES[mode])
    got = forward_and_backward(dtype, *modes)
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == x.dtype
        assert torch.equal(got[name], x), name
        assert not bool(x.isnan().any()), name


@pytest.mark.parametrize("mode", MODES)
def test_large_positions_stay_apart(mode: str):
    """C02: angles of 65536.., which a 16-bit product would make one number."""
    positions = torch.arange(65536, 65540).double()
    freqs = torch.stack([positions, 0.01 * positions], dim=1).float().reshape(4, 1, 1, 2)
    x = torch.tensor([1.0, 0, 0, 0]).expand(1, 1, 4, 4).contiguous()
    g = rotation((1, 1, 4, 4), 2, half_width=True)
    y = torch.full(x.shape, torch.nan)
    with MODES[mode]():
        g.execute({"x": x, "f": freqs, "y": y})
    want = torch.tensor([-0.7218, -0.9724, -0.3289, 0.6169])
    torch.testing.assert_close(y[0, 0, :, 0], want, rtol=0, atol=1e-4)


# Autograd


def test_buffers_that_require_grad_are_read_and_written_without_a_trace():
    g = attention()
    pack = {name: x.requires_grad_() for name, x in buffers(g).items()}
    g.execute(pack)
    for name in ("o", "stats"):
        assert pack[name].is_leaf
        assert pack[name].grad_fn is None
        assert not bool(pack[name].isnan().any())


def test_recording_with_tensors_that_require_grad_keeps_no_graph():
    w = torch.randn(X, requires_grad=True)
    g = ropegraph.pygraph()
    y = g.rope(2 * w, torch.zeros(5, 1, 1, 8)).set_output(True)
    assert all(t.spec.bound.grad_fn is None for t in g.tensors if t.spec.bound is not None)
    out = torch.full(X, torch.nan)
    g.execute({y: out})
    assert torch.equal(out, 2 * w.detach())


def test_autograd_notices_that_an_output_was_written():
    """A value saved for a backward and then overwritten must not be used silently."""
    g = rotation()
    y = torch.ones(X)
    version = y._version
    w = torch.randn(X, requires_grad=True)
    loss = (w * y).sum()
    g.execute({**buffers(g), "y": y})
    assert y._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inputs_are_only_read():
    g = attention()
    pack = buffers(g)
    before = {n: (x.clone(), x._version) for n, x in pack.items() if n not in ("o", "stats")}
    g.execute(pack)
    for name, (old, version) in before.items():
        assert torch.equal(pack[name], old)
        assert pack[name]._version == version


@pytest.mark.parametrize("order", [(True, False), (False, True), (True, True)])
def test_a_graph_may_run_in_and_out_of_inference_mode(order: tuple[bool, ...]):
    """The workspace made in one of them serves in the other."""
    g = attention()
    pack = buffers(g)
    want = run(attention())
    for is_inside in order:
        pack["o"].fill_(torch.nan)
        with torch.inference_mode(is_inside):
            g.execute(pack)
        assert torch.equal(pack["o"], want["o"])


def test_buffers_made_in_inference_mode():
    with torch.inference_mode():
        g = attention()
        pack = buffers(g)
    g.execute(pack)
    assert not bool(pack["o"].isnan().any())


# Threads


def in_threads(jobs: list[Callable[[], None]]) -> None:
    """Run all at once; the first error of any is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def work(job: Callable[[], None]) -> None:
        try:
            start.wait()
            job()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("is_built", [True, False])
def test_two_threads_and_one_graph(is_built: bool):
    """Each has its own workspace and its own buffers, of other shapes where axes are 1 long."""
    g = everything(F32)
    if is_built:
        g.build()

    def job(seed: int) -> Callable[[], None]:
        pack = buffers(everything(F32))
        pack["q"] = torch.randn(2, 6, 5, 8, generator=torch.Generator().manual_seed(seed))
        if seed % 2:
            pack["seq_len_q"] = pack["seq_len_q"].reshape(2)
        want = {**pack, "o": pack["o"].clone(), "stats": pack["stats"].clone()}
        everything(F32).execute(want)

        def work() -> None:
            for _ in range(30):
                pack["o"].fill_(torch.nan)
                g.execute(pack)
                assert torch.equal(pack["o"], want["o"])
                assert torch.equal(pack["stats"], want["stats"])

        return work

    in_threads([job(seed) for seed in range(3)])


def test_a_bad_pack_in_one_thread_is_refused_while_another_runs():
    g = rotation()
    g.build()
    good, bad = buffers(g), buffers(g)
    bad["x"] = bad["x"].transpose(1, 2)
    bad["y"] = torch.full(X, torch.nan)

    def run_good() -> None:
        for _ in range(100):
            g.execute(good)

    def run_bad() -> None:
        for _ in range(100):
            with pytest.raises(GraphError, match="'x' is declared"):
                g.execute(bad)
        assert bool(bad["y"].isnan().all())

    in_threads([run_good, run_bad])


def test_a_thread_that_never_ran_torch_before():
    g = attention()
    pack = buffers(g)
    in_threads([lambda: g.execute(pack)])
    assert torch.equal(pack["o"], run(attention())["o"])
