"""The launcher's arithmetic: what a grid covers, and what it never exceeds."""

import itertools

import pytest

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope import shape
from ropegraph.engines.cuda_rope.job import Four, Job, Side, Table
from ropegraph.engines.cuda_rope.kind import Kind
from ropegraph.engines.cuda_rope.params import JobParams, Params, job_word
from ropegraph.engines.cuda_rope.shape import Split, grid_of, shape_of, widest_vector

BF16, F32 = DType.BFLOAT16, DType.FLOAT


def row_major(dim: Four) -> Four:
    b, h, s, d = dim
    full = (h * s * d, s * d, d, 1)
    b, h, s, d = (0 if n == 1 else x for n, x in zip(dim, full, strict=True))
    return b, h, s, d


def job(
    dim: Four,
    pairs: int = 0,
    begin: int = 0,
    read: DType = BF16,
    written: DType = BF16,
    stride: Four | None = None,
) -> Job:
    stride = stride or row_major(dim)
    return Job(
        kind=Kind(read, written),
        x=Side(0, read, stride),
        y=Side(1, written, row_major(dim)),
        angles=Table(2, 0, 128, 1, 0),
        sines=None,
        rows=dim[2],
        positions=None,
        offsets=None,
        dim=dim,
        begin=begin,
        pairs=pairs or dim[3] // 2,
        is_adjoint=False,
        sign=1.0,
        factor=1.0,
        scale=1.0,
    )


def test_a_grid_covers_every_token_once() -> None:
    """The kernel's own index arithmetic, run over whole grids."""
    for batch, tokens, parts, warps in itertools.product(
        (1, 2, 3, 9), (1, 2, 5, 8), (1, 3), (1, 4)
    ):
        grid = grid_of(batch, tokens, parts, warps)
        seen: list[tuple[int, int, int]] = []
        blocks = itertools.product(range(grid.x), range(grid.y), range(grid.z), range(warps))
        for x, y, z, warp in blocks:
            share = x >> grid.log_group
            group, part = divmod(share, parts)
            tile = (group << grid.log_group) + (x - (share << grid.log_group))
            s = (tile << grid.warps_s) + (warp & ((1 << grid.warps_s) - 1))
            b = (z * grid.y + y) * (warps >> grid.warps_s) + (warp >> grid.warps_s)
            if b < batch and s < tokens:
                seen.append((b, s, part))
        wanted = itertools.product(range(batch), range(tokens), range(parts))
        assert sorted(seen) == sorted(wanted), (batch, tokens, parts, grid)


def test_a_large_grid_leaves_few_warps_idle() -> None:
    grid = grid_of(1000, 1, 2, 4)
    assert grid.warps_s == 0
    assert grid.x * grid.y * grid.z * 4 < 1.01 * 1000 * 2


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("many", [65_536, 70_000, 2**24])
def test_no_axis_of_the_tensor_exceeds_one_of_the_grid(axis: int, many: int) -> None:
    """C14: 65,536 and more in each of batch, heads and positions."""
    dim = [1, 1, 1, 8]
    dim[axis] = many
    jobs = (job((dim[0], dim[1], dim[2], 8)),)
    for vec in (widest_vector(jobs), 1):
        cut = shape_of(jobs, vec)
        grid = grid_of(dim[0], cut.tiles, cut.parts, cut.warps, cut.log_group)
        assert 1 <= grid.x <= 2**31 - 1
        assert 1 <= grid.y <= 65_535
        assert 1 <= grid.z <= 65_535
        entries = grid.y * grid.z * (cut.warps >> grid.warps_s)
        assert entries >= dim[0]
        assert (grid.x // cut.parts << grid.warps_s) >= cut.tiles
        assert sum(c.parts * c.part_heads for c in cut.cuts) >= dim[1]
        assert all(c.tiles << c.turn.log_tokens >= dim[2] for c in cut.cuts)


def test_all_axes_at_65536_at_once() -> None:
    jobs = (job((65_536, 65_536, 65_536, 8)),)
    cut = shape_of(jobs, 4)
    grid = grid_of(65_536, cut.tiles, cut.parts, cut.warps, cut.log_group)
    assert max(grid.y, grid.z) <= 65_535
    assert grid.x <= 2**31 - 1


def test_strides_are_words_of_8_bytes() -> None:
    far = 2**40
    jobs = (job((3, 1, 8, 8), stride=(far, 0, 8, 1)),)
    assert widest_vector(jobs) == 4
    for field in ("x_b", "x_h", "x_s", "x_d", "y_b", "y_h", "y_s", "y_d", "angle_b", "angle_s"):
        assert getattr(JobParams, field).size == 8
        assert getattr(JobParams, field).offset % 8 == 0
    assert job_word(1, "x") * 8 == Params.jobs.offset + JobParams.scale.offset + 4


def test_quotients_by_multiplication() -> None:
    for lanes in range(1, 33):
        split = Split(lanes, 0, 32 // lanes)
        assert all(x * split.magic >> 10 == x // lanes for x in range(32))
    for parts in (2, 3, 5, 7, 10, 1000, 65_537):
        magic = -(-(2**64) // parts)
        for x in (0, 1, parts - 1, parts, parts + 1, 2**31 - 1, 2**32 - 1):
            assert x * magic >> 64 == x // parts


@pytest.mark.parametrize(
    ("dim", "pairs", "begin", "read", "written", "want"),
    [
        ((2, 3, 5, 128), 64, 0, BF16, BF16, 8),
        ((2, 3, 5, 128), 64, 0, F32, F32, 4),
        ((2, 3, 5, 128), 64, 0, BF16, F32, 8),
        ((2, 3, 5, 192), 32, 128, BF16, BF16, 8),
        ((2, 3, 5, 192), 32, 4, BF16, BF16, 4),
        ((2, 3, 5, 192), 32, 3, BF16, BF16, 1),
        ((2, 3, 5, 12), 6, 0, BF16, BF16, 2),
        ((2, 3, 5, 10), 5, 0, BF16, BF16, 1),
        ((2, 3, 5, 512), 256, 0, BF16, BF16, 8),
        ((2, 3, 5, 1024), 512, 0, BF16, BF16, 1),
    ],
)
def test_vectors_as_wide_as_widths_allow(
    dim: Four, pairs: int, begin: int, read: DType, written: DType, want: int
) -> None:
    assert widest_vector((job(dim, pairs, begin, read, written),)) == want


def test_vectors_as_wide_as_strides_allow() -> None:
    dim = (2, 3, 5, 128)
    for row, want in ((136, 8), (132, 4), (130, 2), (129, 1)):
        stride = (15 * row, 5 * row, row, 1)
        assert widest_vector((job(dim, stride=stride),)) == want, row
    assert widest_vector((job(dim, stride=(1, 2, 6, 30)),)) == 1
    # The axis of length 1 is never stepped over, so its stride is no matter (C12).
    assert widest_vector((job((1, 3, 5, 128), stride=row_major((1, 3, 5, 128))),)) == 8


def bshd(b: int, s: int, h: int) -> Job:
    return job((b, h, s, 128), stride=(s * h * 128, 128, h * 128, 1))


def test_small_launches_have_several_warps_a_block() -> None:
    small, large = bshd(1, 256, 32), bshd(2, 8192, 32)
    assert shape_of((small,), 8).warps == 4
    assert shape_of((large, bshd(2, 8192, 8)), 8).warps == 1
    # One head leaves a warp little to do: blocks of one would start too slowly.
    assert shape_of((bshd(2, 8192, 1),), 8).warps == 4
    assert shape_of((large,), 8).cuts[0].part_heads == shape.UNITS * 4


def test_a_unit_is_what_lies_side_by_side() -> None:
    def split(one: Job) -> tuple[int, int]:
        turn = shape_of((one,), 8).cuts[0].turn
        return turn.heads, 2**turn.log_tokens

    assert split(bshd(2, 8192, 32)) == (4, 1)
    assert split(job((2, 32, 8192, 128))) == (2, 2)
    assert split(bshd(2, 8192, 1)) == (1, 4)
    assert split(bshd(2, 8192, 2)) == (2, 2)
    assert split(job((2, 1, 1, 128))) == (4, 1)


def test_a_single_head_does_not_burden_the_many_beside_it() -> None:
    many, one = bshd(1, 4096, 128), bshd(1, 4096, 1)
    assert shape_of((one,), 8).angles == 8
    assert shape_of((many, one), 8).angles == shape_of((many,), 8).angles == 2


def test_blocks_sweep_over_tokens_where_these_lie_closer() -> None:
    assert shape_of((bshd(2, 8192, 32),), 8).log_group == 0
    whole, long = (shape_of((job((1, 32, s, 128)),), 8) for s in (8192, 131_072))
    grid = grid_of(1, whole.tiles, whole.parts, 1, whole.log_group)
    assert 2**grid.log_group >= whole.tiles
    assert long.log_group == shape.LOG_GROUP_LONG
