"""Where each sequence of a padded, ragged or paged batch lies: views of the bound tensors.

All of a step's lengths, offsets and page tables are read and checked before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ropegraph.engines.torch_executor.sequences import read_starts, row_span, views
from ropegraph.errors import PositionError
from ropegraph.ir.graph import Value
from ropegraph.ir.ops import op_name
from ropegraph.lowering.engine import Step

Env = Sequence[Any]
View = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Lengths:
    """How many rows of each sequence are real."""

    q: Sequence[int]
    kv: Sequence[int]


class LengthReader:
    """Reads seq_len_q and seq_len_kv; without padding every sequence has its full length."""

    def __init__(self, step: Step, b: int, s_q: int, s_kv: int) -> None:
        self._where = f"{op_name(step.node.attrs)} {step.name!r}"
        self._full = Lengths([s_q] * b, [s_kv] * b)
        self._q, self._kv = step.slot("seq_len_q"), step.slot("seq_len_kv")

    def __call__(self, env: Env) -> Lengths:
        return Lengths(
            self._read(env, self._q, "seq_len_q", self._full.q),
            self._read(env, self._kv, "seq_len_kv", self._full.kv),
        )

    def _read(self, env: Env, slot: int, port: str, full: Sequence[int]) -> Sequence[int]:
        if slot < 0:
            return full
        lengths = _on_host(env[slot])
        for i, (length, limit) in enumerate(zip(lengths, full, strict=True)):
            if not 0 <= length <= limit:
                raise PositionError(
                    f"{self._where}: {port} of sequence {i} is {length}; "
                    f"it must lie in 0..{limit}, the rows that the tensor has for it"
                )
        return lengths


class PortReader:
    """One of q, k, v, o, ... of a step: gives its sequences as [1, h, length, d] views.

    Dense: rows [0, length) of batch i.  Ragged: a strided view into the bound tensor, whatever its
    shape, from element offset[i] * multiplier on.  Paged: a copy of the pages in use.
    """

    def __init__(self, step: Step, port: str, table: str | None = None) -> None:
        self._value = step.value(port)
        self._slot = step.slot(port)
        self._where = f"{op_name(step.node.attrs)} {step.name!r}: sequence {{}} of {port!r}"
        offset = self._value.ragged_offset
        self._offsets = -1 if offset is None else step.slots[offset]
        self._table = -1 if table is None else step.slot(table)

    def bind(self, env: Env, lengths: Sequence[int]) -> View:
        """The views of this call.  Raises PositionError for what lies outside of the tensor."""
        x: torch.Tensor = env[self._slot]
        if self._table >= 0:
            return self._paged(x, env[self._table], lengths)
        if self._offsets >= 0:
            return self._ragged(x, env[self._offsets], lengths)
        return lambda i: x[i : i + 1, :, : lengths[i]]

    def fill_outside(self, env: Env, lengths: Sequence[int], number: float) -> None:
        """Write what lies outside of every sequence (and what the problems will fill anyway)."""
        if self._offsets >= 0 or any(length < self._value.dim[2] for length in lengths):
            env[self._slot].fill_(number)

    def _ragged(self, x: torch.Tensor, offsets: torch.Tensor, lengths: Sequence[int]) -> View:
        starts = read_starts(offsets, self._value)
        found = views(x, self._value, starts, lengths)
        row, needed = self._value.stride[2], row_span(self._value)
        for i, length in enumerate(lengths):
            if length and (length - 1) * row + needed > starts[i + 1] - starts[i]:
                raise PositionError(
                    f"{self._where.format(i)}: {length} rows of stride {row} do not fit between "
                    f"ragged offsets {starts[i]} and {starts[i + 1]}"
                )
        return lambda i: found[i].unsqueeze(0)

    def _paged(self, x: torch.Tensor, table: torch.Tensor, lengths: Sequence[int]) -> View:
        n_pool, h, page, d = self._value.dim
        entries = [_on_host(row) for row in table]
        used: list[list[int]] = []
        for i, length in enumerate(lengths):
            count = -(-length // page) if length else 0  # a page may have no rows
            for place, index in enumerate(entries[i][:count]):
                if not 0 <= index < n_pool:
                    raise PositionError(
                        f"{self._where.format(i)}: entry {place} of its page table is {index}; "
                        f"pages are 0..{n_pool - 1}"
                    )
            used.append(entries[i][:count])

        def view(i: int) -> torch.Tensor:
            pages = x.index_select(0, torch.tensor(used[i], dtype=torch.int64, device=x.device))
            rows = pages.transpose(0, 1).reshape(1, h, len(used[i]) * page, d)
            return rows[:, :, : lengths[i]]

        return view


def is_sequenced(step: Step) -> bool:
    """True if some sequences may be shorter than the tensors say, or lie elsewhere."""
    values: list[Value] = [
        step.values[name] for name in (*step.node.inputs.values(), *step.node.outputs.values())
    ]
    ragged = any(value.ragged_offset is not None for value in values)
    ports = ("seq_len_q", "seq_len_kv", "paged_attention_k_table", "paged_attention_v_table")
    return ragged or any(step.has(port) for port in ports)


def _on_host(x: torch.Tensor) -> list[int]:
    return cast("list[int]", x.reshape(-1).tolist())
