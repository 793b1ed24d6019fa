"""A built graph, and the buffers that a run of it takes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ropegraph.api.plans import Form, form_of
from ropegraph.api.pygraph import pygraph
from ropegraph.errors import GraphError
from ropegraph.functional.allocate import empty, laid_out

SlotForms = tuple[Form | None, ...]


class Plan:
    """A built graph.

    reads, writes: names in the order in which tensors are given and made.  needed: those of reads
    that the graph has, with their places.
    written: the forms of what is made, None where nothing is.
    zeros: results that are 0 before they are written: rows of no sequence stay it.
    beside: buffers for the time of a run.  in_place: names that share the buffer of another.
    turn: what makes again the rotations that were not kept, before the graph runs.
    """

    def __init__(
        self,
        graph: pygraph,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        written: SlotForms,
        *,
        zeros: tuple[str, ...] = (),
        beside: Sequence[tuple[str, Form]] = (),
        in_place: Sequence[tuple[str, str]] = (),
        turn: Plan | None = None,
    ) -> None:
        graph.build()
        self.graph, self.reads, self.written = graph, reads, written
        self.beside, self.in_place, self.turn = beside, in_place, turn
        inputs = set(graph.lowered.recorded.inputs)
        self.needed = [(i, name) for i, name in enumerate(reads) if name in inputs]
        self._writes = list(zip(writes, written, strict=True))
        self._zeros = zeros

    def __call__(self, *given: Tensor | None) -> list[Tensor | None]:
        """Run on the tensors in the order of ``reads``; the results in the order of ``writes``."""
        return self.run({name: given[i] for i, name in self.needed})

    def run(self, pack: dict[str, Tensor | None]) -> list[Tensor | None]:
        """Run on the tensors that are needed, by name; results are added to the pack."""
        made: list[Tensor | None] = []
        for name, form in self._writes:
            if form is None:
                made.append(None)
                continue
            x = empty(form)
            if name in self._zeros:
                x.zero_()
            made.append(x)
            pack[name] = x
        for name, form in self.beside:
            pack[name] = empty(form)
        for name, target in self.in_place:
            pack[name] = pack[target]
        try:
            self.graph.execute(pack)
        except GraphError:
            # Some kernels load 16 bytes at a time; a view may start anywhere.
            moved = {
                n: laid_out(x, form_of(x))
                for n, x in pack.items()
                if x is not None and x.data_ptr() & 15
            }
            if not moved:
                raise
            self.graph.execute(pack | moved)
            for name in moved.keys() & self.graph.lowered.plan.graph.rewritten:
                pack[name].copy_(moved[name])  # pyright: ignore[reportOptionalMemberAccess]
        return made
