"""freqs and cos_sin: shapes, rounding, and what rope makes of them."""

import pytest
import torch

import ropegraph as rg
from ropegraph import angles

F32, F64 = torch.float32, torch.float64


def test_shapes() -> None:
    one = angles.default(head_dim=12)
    axes = angles.axial(head_dim=12)
    for given, positions, shape in (
        (one, torch.arange(5), [5, 1, 1, 12]),
        (one, torch.zeros(1, 5, dtype=torch.int32), [5, 1, 1, 12]),
        (one.inv_freq, torch.zeros(3, 5), [5, 3, 1, 12]),
        (axes, torch.zeros(2, 5), [5, 1, 1, 12]),
        (axes, torch.zeros(2, 3, 5), [5, 3, 1, 12]),
        (one, torch.zeros(3, 0), [0, 3, 1, 12]),
    ):
        table = angles.freqs(given, positions)
        half = angles.freqs(given, positions, width="half")
        assert list(table.shape) == shape
        assert table.is_contiguous()
        assert half.is_contiguous()
        assert torch.equal(table, torch.cat((half, half), dim=-1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, F32, F64])
def test_positions_up_to_two_to_the_24(dtype: torch.dtype) -> None:
    """The fp32 angle is the product of the fp32 inverse frequency, rounded once."""
    at = torch.tensor([[-(2**24), -1, 0, 1], [2**24, 2**24 - 1, 2**23 + 1, 65_537]]).to(dtype)
    inv_freq = angles.default(head_dim=128, rope_theta=5e5).inv_freq
    table = angles.freqs(inv_freq, at, width="half")
    want = (at.to(F64).t()[:, :, None, None] * inv_freq.to(F64)).to(F32)
    assert torch.equal(table, want)
    wide = angles.freqs(inv_freq, at, width="half", dtype=F64)
    assert torch.equal(wide, at.to(F64).t()[:, :, None, None] * inv_freq.to(F64))


def test_fp64_frequencies_give_the_true_angle_rounded() -> None:
    at = torch.tensor([2**24 - 1, 2**24 + 1, 123_457])
    true = angles.default(head_dim=64, dtype=F64)
    table = angles.freqs(true, at, width="half")
    assert table.dtype is F32
    want = at.to(F64)[:, None] * 1e4 ** (-torch.arange(0, 64, 2, dtype=F64) / 64)
    assert torch.allclose(table[:, 0, 0].to(F64), want, rtol=2**-24 * 1.001, atol=0.0)


def test_cos_sin_round_once_after_the_factor() -> None:
    table = angles.freqs(angles.default(head_dim=64), torch.arange(300))
    factor = 1.1386294361119891
    cos, sin = angles.cos_sin(table, torch.bfloat16, attention_factor=factor)
    assert torch.equal(cos, (table.cos() * factor).bfloat16())
    assert torch.equal(sin, (table.sin() * factor).bfloat16())
    twice = (table.cos().bfloat16() * factor).bfloat16()
    assert not torch.equal(cos, twice)


@pytest.mark.parametrize(
    ("rope_offset", "want"),
    [
        (0, [-1.41335, 1.87912, -2.82886, 4.05819, 5, 6, 7, 8]),
        (4, [1, 2, 3, 4, -5.93780, 5.75734, -6.22435, 8.17637]),
    ],
)
@pytest.mark.parametrize("width", ["full", "half"])
def test_a_partial_rotation_by_the_graph(rope_offset: int, want: list[float], width: str) -> None:
    part = angles.inv_freq({"partial_rotary_factor": 0.5, "rope_theta": 1e4}, head_dim=8)
    table = angles.freqs(part, torch.tensor([3]), width="half" if width == "half" else "full")
    g = rg.pygraph(io_data_type=F32)
    x, t = g.tensor((1, 1, 1, 8), name="x"), g.tensor_like(table, name="t")
    keywords = {"rope_dim": 4, "rope_offset": rope_offset, "half_width": width == "half"}
    g.rope(x, t, **keywords, name="turn").set_output(True).set_name("y")
    g.build()
    y = torch.empty(1, 1, 1, 8)
    g.execute({"x": torch.arange(1.0, 9).reshape(1, 1, 1, 8), "t": table, "y": y})
    assert y.flatten().tolist() == pytest.approx(want, abs=1e-5)


def test_yarn_by_the_graph_scales_the_rotated_channels_alone() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    found = angles.inv_freq(yarn, head_dim=8)
    table = angles.freqs(found, torch.arange(3).repeat(2, 1) + torch.tensor([[0], [500]]))
    g = rg.pygraph(io_data_type=F32)
    x, t = g.tensor((2, 3, 3, 12), name="x"), g.tensor_like(table, name="t")
    y = g.rope(x, t, rope_dim=8, rope_offset=0, attention_factor=found.attention_factor)
    y.set_output(True).set_name("y")
    g.build()
    data, out = torch.randn(2, 3, 3, 12), torch.empty(2, 3, 3, 12)
    g.execute({"x": data, "t": table, "y": out})
    assert torch.equal(out[..., 8:], data[..., 8:])
    size = out[..., :8].norm(dim=-1) / data[..., :8].norm(dim=-1)
    assert torch.allclose(size, torch.full_like(size, found.attention_factor))
