"""Dropout in torch: the generator, that forward and backward share its mask, and that no block,
batch size or layout shows in it.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropegraph.engines.torch_executor import problem
from ropegraph.engines.torch_executor.dropout import Dropout, philox
from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.engines.torch_executor.problem import Tile
from ropegraph.ir.ops import Sdpa
from ropegraph.testing.budget import assert_within
from tests.engines.sdpa_cases import Case, backward, expected, forward
from tests.engines.steps import run


def scalar(n: int) -> Tensor:
    return torch.tensor(n, dtype=torch.int64)


# The published known answers of Random123 for philox4x32-10.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    a, b, c, d = (scalar(n) for n in counter)
    for k in (key, (scalar(key[0]), scalar(key[1]))):
        assert tuple(int(w) for w in philox((a, b, c, d), k)) == words


def factors(case: Case, seed: int = 1234, offset: int = 5) -> Tensor:
    """What each weight is multiplied by, [b, h_q, s_q, s_kv], from the documented counter."""
    p = case.dropout_p or 0.0
    made = torch.empty(case.b, case.h_q, case.s_q, case.s_kv, dtype=torch.float64)
    for b in range(case.b):
        for h in range(case.h_q):
            for i in range(case.s_q):
                for j in range(case.s_kv):
                    counter = (j // 4, i, b * case.h_q + h, offset)
                    a, b_, c, d = (scalar(n) for n in counter)
                    word = int(philox((a, b_, c, d), (seed, 0))[j % 4])
                    made[b, h, i, j] = 0.0 if word < round(p * 2**32) else 1 / (1 - p)
    return made


def cases() -> list[Case]:
    small = {"s_q": 3, "s_kv": 7, "dropout_p": 0.4}
    return [
        Case(**small),
        Case(**small, h_q=3, h_k=3, h_v=1, sink=True, bias=(1, 1, 3, 7)),
        Case(**small, attrs={"left_bound": 4, "right_bound": 2, "bottom_right": True}),
        Case(**small, len_q=[3, 2], len_kv=[6, 5], attrs={"right_bound": 0, "bottom_right": True}),
    ]


@pytest.mark.parametrize("which", range(4))
def test_the_documented_mask_forward_and_backward(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases()[which]
    inputs, d_o = case.inputs(), case.d_o()
    want = expected(case, inputs, d_o, factors(case))
    for elems, rows in ((1 << 18, 64), (1, 1), (30, 2)):
        monkeypatch.setattr(problem, "TILE_ELEMS", elems)
        monkeypatch.setattr(problem, "MIN_ROWS", rows)
        got = forward(case, inputs)
        got |= backward(case, inputs, got["O"], got["Stats"], d_o)
        for port, value in want.items():
            assert_within(got[port], value, 1e-12, port)


def test_one_key_gives_zero_or_two() -> None:
    """C26: s_kv = 1, v = 1, p = 0.5: rows are 0 or 2, and dV is the column sum of O."""
    case = Case(b=1, h_q=1, h_k=1, h_v=1, s_q=64, s_kv=1, d_qk=8, d_v=8, dropout_p=0.5)
    inputs = case.inputs()
    inputs["v"] = torch.ones_like(inputs["v"])
    got = forward(case, inputs)
    assert set(got["O"].flatten().tolist()) == {0.0, 2.0}
    grads = backward(case, inputs, got["O"], got["Stats"], torch.ones_like(got["O"]))
    assert torch.equal(grads["dV"][0, 0, 0], got["O"][0, 0].sum(0))
    assert torch.equal(forward(case, inputs)["O"], got["O"])
    assert not torch.equal(forward(case, {**inputs, "offset": scalar(6)})["O"], got["O"])
    assert not torch.equal(forward(case, {**inputs, "seed": scalar(1235)})["O"], got["O"])
    high = {**inputs, "seed": scalar(1234 + 2**32)}
    assert not torch.equal(forward(case, high)["O"], got["O"])
    negative = {**inputs, "seed": scalar(-1), "offset": scalar(-(2**40))}
    assert torch.equal(forward(case, negative)["O"], forward(case, negative)["O"])


def test_p_of_0_and_of_1() -> None:
    for p, share in ((0.0, 1.0), (1.0, 0.0)):
        case = Case(dropout_p=p)
        inputs, d_o = case.inputs(), case.d_o()
        want = expected(case, inputs, d_o, torch.full((1, 1, 1, 1), share))
        got = forward(case, inputs)
        got |= backward(case, inputs, got["O"], got["Stats"], d_o)
        for port, value in want.items():
            assert_within(got[port], value, 1e-12, port)


def test_the_share_that_is_kept() -> None:
    tile = Tile(slice(0, 3), slice(0, 4), 0, 300, 0, 301)
    for p in (0.1, 0.5, 0.9):
        dropped = Dropout(p, 7, 0, 4).dropped(tile, torch.device("cpu")).double()
        assert dropped.shape == tile.shape
        n = dropped.numel()
        assert abs(float(dropped.mean()) - p) < 4 * (p * (1 - p) / n) ** 0.5
        # Neighbours along every axis draw independently.
        for axis in range(4):
            a, b = dropped.narrow(axis, 0, 2).unbind(axis)
            product = float(((a - p) * (b - p)).mean())
            assert abs(product) < 5 * p * (1 - p) / a.numel() ** 0.5


def test_seed_and_offset_in_every_form() -> None:
    case = Case(dropout_p=0.3)
    inputs = case.inputs()
    want = forward(case, inputs)["O"]
    forms: list[dict[str, Any]] = [
        {"seed": torch.tensor(1234, dtype=torch.int32), "offset": torch.tensor([5])},
        {"seed": torch.tensor([[[[1234]]]]), "offset": torch.tensor(5, dtype=torch.int32)},
    ]
    for form in forms:
        got = run(Sdpa(**case.op()), {**inputs, **form}, ["O"], TorchExecutor())
        assert torch.equal(got["O"], want)


def test_a_batch_draws_what_its_sequences_draw() -> None:
    """Padding alone changes nothing: b, i and j count sequences and positions in them."""
    case = Case(b=3, dropout_p=0.4)
    padded = replace(case, len_q=[7, 7, 7], len_kv=[9, 9, 9])
    inputs = case.inputs()
    assert_within(
        forward(padded, {**padded.inputs(), **inputs})["O"], forward(case, inputs)["O"], 1e-12
    )
