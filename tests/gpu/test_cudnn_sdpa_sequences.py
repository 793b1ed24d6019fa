"""cuDNN's attention over sequences that end before their tensors do: padded, ragged, paged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.engines.cudnn_sdpa.engine import CudnnSdpa
from ropegraph.engines.reference import Reference
from ropegraph.engines.torch_executor.engine import TorchExecutor
from tests.gpu.attention import (
    F64,
    Problem,
    Ragged,
    backward,
    check,
    forward,
    lengths,
    problem,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDNN = CudnnSdpa()
BF16 = torch.bfloat16
CAUSAL = {"right_bound": 0}
ENDING = {"right_bound": 0, "bottom_right": True}
LENGTHS = {
    "some": ((200, 131, 64), (264, 140, 129)),
    "empty keys": ((200, 131, 64), (264, 0, 129)),
    "empty first": ((0, 131, 64), (0, 140, 129)),
    "empty queries": ((200, 0, 64), (264, 140, 129)),
    "all empty": ((0, 0, 0), (0, 0, 0)),
    "more rows than keys": ((200, 131, 64), (264, 70, 29)),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def past(numbers: tuple[int, ...], s: int) -> Tensor:
    """True for slots past the end, [b, 1, s, 1]."""
    ends = torch.tensor(numbers, device="cuda")[:, None]
    return (torch.arange(s, device="cuda") >= ends)[:, None, :, None]


def padded(name: str, layout: str = "bshd", **more: Any) -> Problem:
    """Three sequences whose slots past the end hold NaN, or Inf in the keys."""
    rows, keys = LENGTHS[name]
    given = problem(b=3, padding=True, **more)
    given.inputs |= {"seq_len_q": lengths(*rows), "seq_len_kv": lengths(*keys)}
    for port, numbers, bad in (
        ("q", rows, torch.nan),
        ("k", keys, torch.inf),
        ("v", keys, torch.nan),
    ):
        x = given.inputs[port]
        x = x.contiguous() if layout == "bhsd" else x
        given.inputs[port] = x.masked_fill_(past(numbers, x.shape[2]), bad)
    return given


def dirty(like: Tensor, name: str) -> Tensor:
    """A gradient whose rows past the end hold NaN."""
    made = torch.empty_like(like).copy_(torch.randn(like.shape, device="cuda"))
    return made.masked_fill_(past(LENGTHS[name][0], like.shape[2]), torch.nan)


def both_ways(given: Problem, d_o: Tensor | None = None, **attrs: Any) -> None:
    got = forward(CUDNN, given)
    check(got, forward(Reference(), given, F64), BF16)
    d_o = torch.randn_like(got["O"]) if d_o is None else d_o
    more = ["dBias"] if "bias" in given.inputs else []
    check(
        backward(CUDNN, given, got, d_o, more, **attrs),
        backward(Reference(), given, got, d_o, more, F64),
        BF16,
    )


@pytest.mark.parametrize("attrs", [{}, CAUSAL, ENDING], ids=["open", "causal", "bottom right"])
@pytest.mark.parametrize("name", LENGTHS)
def test_slots_past_the_end_never_leak(name: str, attrs: dict[str, Any]) -> None:
    given = padded(name, **attrs)
    both_ways(given, dirty(given.inputs["q"], name))


@pytest.mark.parametrize(
    "more",
    [
        {"layout": "bhsd"},
        {"d_qk": 128, "d_v": 128},
        {"d_qk": 72, "d_v": 72},
        {"h_q": 12, "h_k": 2, "h_v": 4},
        {"left_bound": 33, **CAUSAL},
        {"left_bound": 33, **ENDING},
        {"right_bound": 5},
        {"alibi": True, **CAUSAL},
        {"extra": "bias"},
        {"deterministic": True},
    ],
    ids=str,
)
def test_and_not_with_other_features_either(more: dict[str, Any]) -> None:
    more, attrs = dict(more), {}
    if more.pop("deterministic", False):
        attrs = {"deterministic": True}
    if more.pop("extra", ""):
        more["extra"] = {"bias": torch.randn(1, 4, 200, 264, device="cuda").to(BF16)}
    given = padded("some", **more)
    both_ways(given, dirty(given.inputs["q"][..., : given.inputs["v"].shape[3]], "some"), **attrs)


def test_packed_tensors_may_be_padded() -> None:
    given = padded("some", s_kv=200)
    keys = LENGTHS["some"][1]
    x = torch.randn(3, 200, 8, 64, device="cuda").to(BF16).transpose(1, 2)
    given.inputs |= {"q": x[:, :4], "k": x[:, 4:6], "v": x[:, 6:]}
    given.inputs["seq_len_kv"] = lengths(*(min(n, 200) for n in keys))
    both_ways(given)


def test_lengths_beyond_a_tensor_are_its_length() -> None:
    given = padded("some")
    wrong = {"seq_len_q": lengths(10**9, 131, 64), "seq_len_kv": lengths(264, 140, 129)}
    want = forward(CUDNN, given)
    given.inputs |= wrong
    got = forward(CUDNN, given)
    assert all(torch.equal(got[name], want[name]) for name in got)


def test_one_sequence_and_expanded_keys() -> None:
    given = problem(b=1, padding=True, **CAUSAL)
    given.inputs |= {"seq_len_q": lengths(131), "seq_len_kv": lengths(140)}
    both_ways(given)
    given = padded("some")
    given.inputs["k"] = given.inputs["k"][:1].expand(3, -1, -1, -1)
    check(forward(CUDNN, given), forward(Reference(), given, F64), BF16)


def test_a_sink_is_served_forward() -> None:
    for name in ("some", "empty keys"):
        sink = torch.randn(1, 4, 1, 1, device="cuda")
        given = padded(name, extra={"sink_token": sink})
        got, want = forward(CUDNN, given), forward(Reference(), given, F64)
        # Rows of no sequence have no Stats; the engines differ in what they leave there.
        rows = ~past(LENGTHS[name][0], 200).expand_as(got["Stats"])
        check({"O": got["O"], "Stats": got["Stats"][rows]},
              {"O": want["O"], "Stats": want["Stats"][rows]}, BF16)  # fmt: skip


def test_stats_are_exchanged_with_the_torch_engine() -> None:
    for name in ("some", "empty keys"):
        given = padded(name, **CAUSAL)
        d_o = dirty(given.inputs["q"], name)
        for made in (forward(CUDNN, given), forward(TorchExecutor(), given)):
            want = backward(Reference(), given, made, d_o, (), F64)
            for engine in (CUDNN, TorchExecutor()):
                check(backward(engine, given, made, d_o), want, BF16)


def thd(
    rows: tuple[int, ...], keys: tuple[int, ...], gap: int = 0, dtype: torch.dtype = torch.int32,
    is_stats_ragged: bool = False, **attrs: Any,
) -> Problem:  # fmt: skip
    """Packed tokens [t, h, d]; between two sequences lie ``gap`` tokens full of NaN."""
    b, d, loose, ragged, inputs = len(rows), 64, {}, {}, {}
    for ports, heads, numbers in ((("q", "O"), 4, rows), (("k", "v"), 2, keys)):
        starts = [sum(numbers[:i]) + gap * i for i in range(b + 1)]
        offsets = torch.tensor(starts, dtype=dtype, device="cuda").reshape(-1, 1, 1, 1)
        loose[f"starts_{heads}"] = offsets * (heads * d)
        s = max(*numbers, 1)
        for port in ports:
            if port != "O":
                x = torch.full((max(starts[-1], 1), heads, d), torch.nan, device="cuda").to(BF16)
                for start, n in zip(starts, numbers, strict=False):
                    x[start : start + n] = torch.randn(n, heads, d, device="cuda").to(BF16)
                inputs[port] = x
            stride = (s * heads * d, d, heads * d, 1)
            ragged[port] = Ragged((b, heads, s, d), stride, f"starts_{heads}")
        if heads == 4 and is_stats_ragged:
            loose["starts_stats"] = offsets * heads
            ragged["Stats"] = Ragged((b, heads, s, 1), (s * heads, 1, heads, 1), "starts_stats")
    inputs |= {"seq_len_q": lengths(*rows), "seq_len_kv": lengths(*keys)}
    return Problem(inputs, {"attn_scale": 0.125, "padding": True, **attrs}, ragged, loose)


@pytest.mark.parametrize(
    ("rows", "keys"), [((200, 131, 64), (264, 140, 129)), ((200, 0, 64), (264, 70, 0))]
)
@pytest.mark.parametrize("gap", [0, 17])
@pytest.mark.parametrize("attrs", [{}, CAUSAL, ENDING], ids=["open", "causal", "bottom right"])
def test_ragged(
    rows: tuple[int, ...], keys: tuple[int, ...], gap: int, attrs: dict[str, Any]
) -> None:
    both_ways(thd(rows, keys, gap, **attrs))


def test_ragged_in_other_ways() -> None:
    rows, keys = (200, 131, 64), (200, 131, 64)
    both_ways(thd(rows, keys, dtype=torch.int64, **CAUSAL))
    both_ways(thd(rows, keys, left_bound=33, **CAUSAL))
    both_ways(thd(rows, keys, 17, **CAUSAL), deterministic=True)
    if torch.cuda.get_device_capability()[0] not in (8, 12):
        both_ways(thd(rows, keys, 17, is_stats_ragged=True, **CAUSAL))


@pytest.mark.parametrize("page", [8, 16, 128])
def test_paged_decoding_reads_no_slot_past_the_end(page: int) -> None:
    b, pages = 3, 640 // page
    keys = (640, 131, 70)
    given = problem(b=b, s_q=1, s_kv=640, padding=True, max_seq_len_kv=640)
    for port in ("k", "v"):
        x = given.inputs[port].masked_fill(past(keys, 640), torch.nan)
        order = torch.randperm(b * pages, device="cuda")
        pool = torch.empty(b * pages, 2, page, 64, dtype=BF16, device="cuda")
        pool[order] = x.reshape(b, 2, pages, page, 64).transpose(1, 2).reshape(-1, 2, page, 64)
        given.inputs[port] = pool
        given.inputs[f"paged_attention_{port}_table"] = order.int().reshape(b, 1, pages, 1)
    given.inputs |= {"seq_len_q": lengths(1, 1, 1), "seq_len_kv": lengths(*keys)}
    check(forward(CUDNN, given), forward(Reference(), given, F64), BF16)
    given.inputs["seq_len_kv"] = lengths(640, 0, 70)
    check(forward(CUDNN, given), forward(Reference(), given, F64), BF16)
