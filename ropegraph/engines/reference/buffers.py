"""Bound tensors to dense ones and back: strided, ragged or paged, with one rounding on the way out.

A dense copy has the dims of its Value. Rows that belong to no sequence are zero in it, so nothing
that a buffer holds outside its sequences (NaN, or bytes of somebody else) is ever read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ropegraph.ir.graph import Value
from ropegraph.lowering.engine import Step


def gather(
    step: Step, port: str, env: Sequence[Tensor], lengths: Sequence[int] | None = None
) -> Tensor:
    """A dense copy of the value at ``port``, in its own dtype.

    lengths: rows of each batch entry that are real; by default all, or what ragged offsets say.
    """
    value, bound = step.value(port), env[step.slot(port)]
    if value.ragged_offset is None:
        dense = bound.detach().clone()
        for i, length in enumerate(lengths or ()):
            dense[i, :, length:] = 0
        return dense
    dense = torch.zeros(value.dim, dtype=bound.dtype, device=bound.device)
    for i, (rows, length) in enumerate(_sequences(step, value, bound, env, lengths)):
        dense[i, :, :length] = rows
    return dense


def gather_paged(
    step: Step, port: str, env: Sequence[Tensor], s_kv: int, lengths: Sequence[int]
) -> Tensor:
    """K or V [b, h, s_kv, d] from its pool of pages [n, h, page, d] and table [b, 1, pages, 1].

    Table entries past the pages that a sequence fills are not looked at.
    """
    pool = env[step.slot(port)].detach()
    table = env[step.slot(f"paged_attention_{port}_table")].reshape(len(lengths), -1).long()
    _, h, page, d = pool.shape
    dense = torch.zeros(len(lengths), h, s_kv, d, dtype=pool.dtype, device=pool.device)
    for i, length in enumerate(lengths):
        token = torch.arange(length, device=pool.device)
        dense[i, :, :length] = pool[table[i, token // page], :, token % page].transpose(0, 1)
    return dense


def scatter(
    step: Step,
    port: str,
    env: Sequence[Tensor],
    dense: Tensor,
    lengths: Sequence[int] | None = None,
    fill: float = 0.0,
) -> None:
    """Round ``dense`` to the bound dtype and write it in place, ``fill`` outside every sequence."""
    value, bound = step.value(port), env[step.slot(port)]
    rounded = round_once(dense, bound.dtype)
    if value.ragged_offset is None:
        bound.copy_(rounded.reshape(bound.shape))
        return
    bound.fill_(fill)
    for i, (rows, length) in enumerate(_sequences(step, value, bound, env, lengths)):
        rows.copy_(rounded[i, :, :length])


def sequence_lengths(step: Step, value: Value, env: Sequence[Tensor]) -> list[int]:
    """Rows of each sequence of a ragged value by its offsets, at most s."""
    offsets, (_, _, s, _) = _offsets(step, value, env), value.dim
    step_elems = value.stride[2]
    return [min((b - a) // step_elems, s) for a, b in pairwise(offsets)]


def integers(step: Step, port: str, env: Sequence[Tensor]) -> list[int]:
    """A small tensor of integers, flattened."""
    return _integers(env[step.slot(port)])


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 to ``dtype`` with one rounding, to nearest even.

    torch goes from fp64 to a 16-bit type through fp32, which rounds twice. Here the fp32 in
    between is rounded to odd: its last bit then remembers on which side of a tie x was.
    """
    if x.dtype != torch.float64 or dtype not in (torch.float16, torch.bfloat16):
        return x.to(dtype)
    near = x.float()
    rest = x - near.double()
    is_even = near.view(torch.int32) % 2 == 0
    other = torch.nextafter(near, torch.sign(rest).float() * torch.inf)
    is_inexact = torch.isfinite(near) & (rest != 0)
    return torch.where(is_inexact & is_even, other, near).to(dtype)


def _offsets(step: Step, value: Value, env: Sequence[Tensor]) -> list[int]:
    assert value.ragged_offset is not None
    raw = _integers(env[step.slots[value.ragged_offset]])
    return [x * value.ragged_multiplier for x in raw]


def _integers(x: Tensor) -> list[int]:
    return [int(element) for element in torch.unbind(x.detach().reshape(-1).cpu())]


def _sequences(
    step: Step,
    value: Value,
    bound: Tensor,
    env: Sequence[Tensor],
    lengths: Sequence[int] | None,
) -> list[tuple[Tensor, int]]:
    """A view [h, length, d] of each sequence in the bound buffer, and its length."""
    _, h, _, d = value.dim
    starts = _offsets(step, value, env)
    lengths = sequence_lengths(step, value, env) if lengths is None else lengths
    bound = bound.detach()
    origin = bound.storage_offset()
    return [
        (bound.as_strided((h, n, d), value.stride[1:], origin + start), n)
        for start, n in zip(starts, lengths, strict=False)
    ]
