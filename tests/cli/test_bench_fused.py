"""The GPU's rows of fused forms, at small sizes on CPU tensors: launches, numbers, verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.cli.bench import decode, mla, norm, positions, qkv, rotation, timing
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.work import Handles, Work, copy_of
from ropegraph.cli.bench.workload import BF16, D, half_angles, heads, separate_heads
from ropegraph.compile import lower
from ropegraph.lowering.engine import Device
from ropegraph.testing import oracle

Rows = Callable[[], list[Row]]
GROUPS: dict[str, tuple[Rows, int]] = {
    "positions": (
        lambda: positions.rows(2, 6, uneven=(20, 3, 0, 17, 1), even=(4,) * 6, device="cpu"), 7
    ),
    "qkv": (lambda: qkv.rows(2, 5, device="cpu"), 4),
    "mla": (lambda: mla.rows((2, 3, 64), (1, 5, 32), device="cpu"), 12),
    "norm": (lambda: norm.rows(2, 5, long=9, device="cpu"), 13),
    "decode": (lambda: decode.rows(3, 24, device="cpu"), 4),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_every_row_of_a_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works are compared with ``reference`` when made; ours takes 3 us, all others 2."""

    def timed(works: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
        assert rounds == timing.RATIO_ROUNDS
        for work in works.values():
            if isinstance(work, Work):
                assert [step.engine for step in work.graph.plan.steps] == ["torch"]
                there = lower(work.graph._look(), Device("cuda", 0, 90), None).plan
                assert [step.engine for step in there.steps] == ["cuda.rope"]
            work()
            work()
        return {n: 2.0 + (i == 0) for i, n in enumerate(works)}

    monkeypatch.setattr(timing, "device_in_turn", timed)
    build, count = GROUPS[name]
    rows = build()
    assert len(rows) == len({row.work for row in rows}) == count
    for row in rows:
        assert (row.ours_us, row.value, row.unit) == (3.0, 1.5, "x")
        assert row.verdict.endswith("missed") or row.target is None
        assert set(row.others.values()) == {2.0}


def test_a_ratio_is_to_the_first_of_the_others() -> None:
    row = Row.of_ratio("w", {"ours": 10.4, "copy": 10.0, "torch": 40.0}, 1.05)
    assert (row.ours_us, row.value, row.unit) == (10.4, 1.04, "x")
    assert row.others == {"copy": 10.0, "torch": 40.0}
    assert row.verdict == "<= 1.05 reached"


def turned(x: Tensor, s: int) -> Tensor:
    return oracle.rope(x.double(), half_angles(s, "cpu")[:, 0, 0].double())


def test_rotations_are_what_the_oracle_says() -> None:
    x = separate_heads(2, 5, "cpu")
    work = rotation.in_place(
        rotation.rotation(x, {"freqs": half_angles(5, "cpu")}, half_width=True)
    )
    want = {n: turned(x[n], 5) for n in "qk"}
    work()
    for n in "qk":
        torch.testing.assert_close(x[n].double(), want[n], rtol=2**-8, atol=1e-6)


def test_in_place_packed_qkv_keeps_v() -> None:
    work = qkv.forward(2, 5, place=True, device="cpu")
    whole = work.pack["qkv"]
    q, k, v = (x.flatten(1, -3).clone() for x in qkv.parts(whole))
    work()
    now = [x.flatten(1, -3) for x in qkv.parts(whole)]
    for got, before in zip(now, (q, k), strict=False):
        torch.testing.assert_close(got.double(), turned(before, 5), rtol=2**-8, atol=1e-6)
    assert torch.equal(now[2], v)


def test_bytes_that_must_move() -> None:
    """Q and K once read and once written, V not at all, and the table of fp32 angles."""
    b, s = 2, 5
    least = 2 * b * s * (qkv.H_Q + qkv.H_KV) * D * 2 + s * D // 2 * 4
    for work in (
        positions.dense(b, s, device="cpu"),
        qkv.forward(b, s, device="cpu"),
        qkv.forward(b, s, place=True, device="cpu"),
        qkv.backward(b, s, device="cpu"),
    ):
        assert work.moved_bytes == least
        copied = copy_of(work)()
        assert isinstance(copied, Tensor)
        assert copied.numel() == least // 2
    grads = norm.backward(b, s, device="cpu")
    rows = b * s * (qkv.H_Q + qkv.H_KV)
    assert grads.moved_bytes == 3 * rows * D * 2 + 4 * D * 2 + rows * 4 + s * D // 2 * 4


def test_a_wrong_result_and_a_second_launch_raise() -> None:
    x = {"x": heads((1, 2, 3, 8), device="cpu")}
    scales = iter((1.0, 1.02, 1.0, 1.0))

    def record(g: rg.pygraph, t: Handles) -> None:
        g.scale(t["x"], next(scales)).set_output(True).set_name("y")

    def twice(g: rg.pygraph, t: Handles) -> None:
        for n in "yz":
            g.scale(t["x"], 0.5).set_output(True).set_name(n)

    with pytest.raises(AssertionError, match="scaled: y is not what the engine reference"):
        Work("scaled", x, record)
    assert Work("scaled", x, record).pack["y"].dtype is BF16
    with pytest.raises(AssertionError, match="takes 2 launches, not one"):
        Work("scaled", x, twice)
