"""Every rope type beside its formula, written once more in plain Python floats."""

import math
from typing import Any

import pytest
import torch

from ropegraph import angles

THETA = 12_000.0


def series(r: int, over: int | None = None, theta: float = THETA) -> list[float]:
    return [theta ** (-2 * i / (over or r)) for i in range(r // 2)]


def by_linear() -> list[float]:
    return [f / 2.5 for f in series(24)]


def by_dynamic(seq_len: int) -> list[float]:
    ratio = 2.5 * seq_len / 1000 - 1.5
    return series(24, theta=THETA * ratio ** (24 / 22))


def by_llama3() -> list[float]:
    found = []
    for f in series(64):
        wave = 2 * math.pi / f
        if wave > 4096 / 1.5:
            found.append(f / 2.5)
        elif wave < 4096 / 5.0:
            found.append(f)
        else:
            share = (4096 / wave - 1.5) / 3.5
            found.append((1 - share) * f / 2.5 + share * f)
    assert len({round(f / g, 6) for f, g in zip(series(64), found, strict=True)}) > 2
    return found


def by_yarn(*, truncate: bool) -> list[float]:
    def pair(turns: float) -> float:
        """Where theta ** (2 i / r) * 2 pi * turns = 4096."""
        return 64 / 2 * math.log(4096 / (2 * math.pi * turns), THETA)

    low, high = pair(32), pair(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    shares = [min(max((i - low) / (high - low), 0), 1) for i in range(32)]
    return [f / 2.5 * g + f * (1 - g) for f, g in zip(series(64), shares, strict=True)]


ORIGINAL: dict[str, Any] = {"factor": 2.5, "original_max_position_embeddings": 4096}
SHORT, LONG = [1.0 + 0.1 * i for i in range(12)], [1.0 + 3.7 * i for i in range(12)]
LONGROPE: dict[str, Any] = {"short_factor": SHORT, "long_factor": LONG} | ORIGINAL
DYNAMIC: dict[str, Any] = {"factor": 2.5, "max_position_embeddings": 1000}
CASES: dict[str, tuple[angles.RopeAngles, list[float]]] = {
    name: (make(rope_theta=THETA, dtype=torch.float64, **keywords), want)
    for name, make, keywords, want in (
        ("default", angles.default, {"head_dim": 24}, series(24)),
        ("partial", angles.default, {"head_dim": 48, "partial_rotary_factor": 0.5}, series(24)),
        ("linear", angles.linear, {"head_dim": 24, "factor": 2.5}, by_linear()),
        ("dynamic", angles.dynamic, {"head_dim": 24, **DYNAMIC}, series(24)),
        ("longer", angles.dynamic, {"head_dim": 24, "seq_len": 1777, **DYNAMIC}, by_dynamic(1777)),
        ("yarn", angles.yarn, {"head_dim": 64, **ORIGINAL}, by_yarn(truncate=True)),
        (
            "yarn, fractions of pairs",
            angles.yarn,
            {"head_dim": 64, "truncate": False, **ORIGINAL},
            by_yarn(truncate=False),
        ),
        (
            "longrope, short",
            angles.longrope,
            {"head_dim": 24, "seq_len": 4096, **LONGROPE},
            [f / x for f, x in zip(series(24), SHORT, strict=True)],
        ),
        (
            "longrope, long",
            angles.longrope,
            {"head_dim": 24, "seq_len": 4097, **LONGROPE},
            [f / x for f, x in zip(series(24), LONG, strict=True)],
        ),
        (
            "llama3",
            angles.llama3,
            {"head_dim": 64, "low_freq_factor": 1.5, "high_freq_factor": 5.0, **ORIGINAL},
            by_llama3(),
        ),
        (
            "proportional",
            angles.proportional,
            {"head_dim": 24, "partial_rotary_factor": 0.3, "factor": 2.5},
            [f / 2.5 for f in series(6, over=24)] + [0.0] * 9,
        ),
        ("axial", angles.axial, {"head_dim": 24}, series(12) + series(12)),
    )
}


@pytest.mark.parametrize("name", CASES)
def test_inv_freq_in_fp64(name: str) -> None:
    found, want = CASES[name]
    assert found.inv_freq.dtype is torch.float64
    assert torch.allclose(found.inv_freq, torch.tensor(want, dtype=torch.float64), 1e-13, 0.0)


def test_attention_factors() -> None:
    def yarn(**keywords: Any) -> float:
        return angles.yarn(head_dim=64, **(ORIGINAL | keywords)).attention_factor

    assert yarn() == pytest.approx(0.1 * math.log(2.5) + 1)
    assert yarn(factor=0.9) == 1.0
    assert yarn(attention_factor=1.25, mscale=0.5, mscale_all_dim=0.7) == 1.25
    both = (0.05 * math.log(2.5) + 1) / (0.07 * math.log(2.5) + 1)
    assert yarn(mscale=0.5, mscale_all_dim=0.7) == pytest.approx(both)
    assert yarn(mscale=0.5) == yarn(mscale=0.5, mscale_all_dim=0) == yarn()

    def longrope(**keywords: Any) -> float:
        return angles.longrope(head_dim=24, **(LONGROPE | keywords)).attention_factor

    assert longrope() == pytest.approx(math.sqrt(1 + math.log(2.5) / math.log(4096)))
    assert longrope(factor=None, max_position_embeddings=10_240) == longrope()
    assert longrope(factor=0.5) == 1.0
    assert longrope(attention_factor=1.25) == 1.25


def test_the_width_of_a_partial_rotation() -> None:
    part = {"head_dim": 8, "partial_rotary_factor": 0.5, "rope_theta": 1e4}
    assert angles.default(**part).inv_freq.tolist() == pytest.approx([1.0, 0.01])
    # The other convention has its own name: exponents over the head, partners half a head apart.
    assert angles.proportional(**part).inv_freq.tolist() == pytest.approx([1.0, 0.1, 0.0, 0.0])


def test_axes_of_mrope() -> None:
    plain = angles.default(head_dim=16)
    contiguous = angles.mrope(plain, [2, 3, 3])
    strided = angles.mrope(plain, [4, 2, 2], mrope_interleaved=True)
    assert contiguous.axes is not None
    assert contiguous.axes.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert strided.axes is not None
    assert strided.axes.tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    positions = torch.tensor([[7], [100], [2000]])
    got = angles.freqs(strided, positions, width="half")[0, 0, 0]
    at = torch.tensor([7.0, 100, 2000, 7, 100, 2000, 7, 7])
    assert torch.equal(got, at * plain.inv_freq)
    # Text, the same position three times, has the angles of one axis.
    text = torch.arange(5).expand(3, 5)
    assert torch.equal(angles.freqs(strided, text), angles.freqs(plain, text[0]))
