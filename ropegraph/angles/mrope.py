"""M-RoPE: each pair turns by the temporal, the height or the width position of its token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ropegraph.angles.checks import as_flag, as_section
from ropegraph.angles.result import RopeAngles
from ropegraph.errors import GraphError


def mrope(
    angles: RopeAngles, mrope_section: Sequence[int], *, mrope_interleaved: bool = False
) -> RopeAngles:
    """Share the frequencies of any rope type out to three axes: temporal, height, width.

    mrope_section: how many of the r/2 pairs each axis has, in that order.
    mrope_interleaved: False, contiguous parts (Qwen2-VL); True, every third pair from 1 is height's
    and from 2 width's, as long as their shares last, and the others are temporal (Qwen3-VL). It is
    about the order of frequencies, not about rope's ``interleaved`` pairs.
    Returns the same frequencies with ``axes`` set: positions have three rows. Text gives its one
    position three times.
    Raises GraphError if the section does not add up to r/2 or does not fit.
    Source: arXiv:2409.12191, 2.1; transformers, ``qwen2_vl`` and ``qwen3_vl``.
    """
    pairs = angles.inv_freq.shape[0]
    section = as_section("mrope", mrope_section)
    if angles.axes is not None:
        raise GraphError("mrope: these angles have axes already; use a type of one axis")
    if sum(section) != pairs:
        raise GraphError(
            f"mrope: mrope_section={section} adds up to {sum(section)}; use three numbers that add "
            f"up to {pairs}, the pairs of {2 * pairs} rotated channels"
        )
    strided = as_flag("mrope", "mrope_interleaved", mrope_interleaved)
    axes = _strided(section, pairs) if strided else _contiguous(section)
    found = torch.tensor(axes, dtype=torch.int64, device=angles.inv_freq.device)
    return replace(angles, axes=found, axis_count=3)


def _contiguous(section: list[int]) -> list[int]:
    return [axis for axis, count in enumerate(section) for _ in range(count)]


def _strided(section: list[int], pairs: int) -> list[int]:
    axes = [i % 3 if i < 3 * section[i % 3] else 0 for i in range(pairs)]
    if [axes.count(axis) for axis in range(3)] != section:
        raise GraphError(
            f"mrope: mrope_section={section} does not fit every third of {pairs} pairs; with "
            f"mrope_interleaved use up to {(pairs + 1) // 3} for height, {pairs // 3} for width"
        )
    return axes
