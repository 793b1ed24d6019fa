"""How a launch of mla.cu is cut: vector width, heads together, grid. Plain arithmetic, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ropegraph.engines.cuda_rope.job import Side
from ropegraph.engines.cuda_rope.mla import Mode, Task
from ropegraph.engines.cuda_rope.shape import LANES, MAX_WORD, MAX_X, MAX_YZ

BLOCK = 32  # elements that share an MXFP8 scale
SHARED_BYTES = 48 * 1024  # that a block has without asking for more


@dataclass(frozen=True)
class Cut:
    """How one kernel works on a task.

    part_heads, parts: heads a warp takes (MXFP8 by vectors: a block), and how many times to have
    all.  shares: warps, or blocks, for a tile of tokens, ``each`` of each part.  batch: entries
    along x.
    """

    part_heads: int
    parts: int
    shares: int
    each: int
    log_group: int
    batch: int
    grid: tuple[int, int, int]


def vector_of(task: Task) -> int:
    """Elements that a lane moves at once: up to 16 bytes; 1 if strides or widths allow no vector.

    The base pointers have to be aligned as well: alignment() says how much.
    """
    vec = MAX_WORD // task.data.itemsize
    if task.mode is Mode.MXFP8:
        # A side without channels has no tile to be cut out of.
        is_regular = task.nope % BLOCK == 0 and min(task.key_dim, task.v, _shared_heads(task)) > 0
        fitting = (n for n in (task.tuning.vec, vec) if is_regular and _fits(task, n))
        return next(fitting, 1)
    while vec > 1 and not _fits(task, vec):
        vec //= 2
    return vec


def alignment(field: str, side: Side, vec: int) -> int:
    """Bytes that the base of a tensor must be a multiple of for vectors of ``vec`` elements."""
    is_single = field in ("key_scale", "value_scale")  # bytes: words only where they may be
    return 1 if is_single else min(MAX_WORD, vec * side.dtype.itemsize)


def _fits(task: Task, vec: int) -> bool:
    if any(n % vec for n in (task.nope, task.v, task.half)):
        return False
    if task.mode is Mode.BACKWARD and 2 * task.half > LANES * vec:
        return False
    for field, side in (*task.places.items(), *task.tables.items()):
        align = alignment(field, side, vec)
        *outer, stride_d = side.stride
        if align > 1 and stride_d != 1:
            return False
        if any(s * side.dtype.itemsize % align for s in outer):
            return False
    return True


def _shared_heads(task: Task) -> int:
    """Heads of which a block has room for the scales, beside 32 tokens of what turns, in bf16."""
    room = SHARED_BYTES - BLOCK * max(2 * task.half, task.tuning.vec) * 2  # one vector at least
    return room // max(1, task.key_dim + task.v)


def scales_of(task: Task, part_heads: int) -> int:
    """MXFP8 scales of a token in so many heads."""
    return part_heads * (task.key_dim + task.v) // BLOCK


def cut_of(task: Task, vec: int) -> Cut:
    """Heads a warp or a block takes, and the grid over all of them."""
    tuning = task.tuning
    if task.mode is not Mode.MXFP8:
        tokens = tuning.tokens if vec > 1 else 1
        rows = LANES // max(1, min(LANES, (task.nope + task.v) // vec))
        part_heads = max(1, min(task.heads, max(1, tuning.units // tokens) * rows))
        tiles = -(-task.tokens // tokens)
        sums = tokens if task.mode is Mode.BACKWARD else 0
        return _cut(task, part_heads, tiles, tuning.warps, sums=sums)
    tiles = task.tokens // BLOCK
    if vec == 1:
        return _cut(task, 1, tiles, tuning.warps, each=scales_of(task, 1))
    part_heads = max(1, min(task.heads, tuning.units, _shared_heads(task)))
    return _cut(task, part_heads, tiles, 1)


def _cut(
    task: Task, part_heads: int, tiles: int, block_shares: int, *, each: int = 1, sums: int = 0
) -> Cut:
    """The grid, of blocks with so many shares; the kernel leaves out what is too many."""
    parts = -(-task.heads // part_heads)
    tuning, shares = task.tuning, parts * each + sums
    log_group = tuning.log_group
    while log_group and 2**log_group > tiles:
        log_group -= 1
    works = (-(-tiles >> log_group) << log_group) * shares
    batch = task.batch if tuning.is_batch_inner or task.is_batch_next else 1
    if works * batch > MAX_X:
        batch = 1
    entries = -(-task.batch // max(1, batch))
    z = max(1, -(-entries // MAX_YZ))
    grid = max(1, -(-works * batch // block_shares)), max(1, -(-entries // z)), z
    return Cut(part_heads, parts, shares, each, log_group, max(1, batch), grid)
