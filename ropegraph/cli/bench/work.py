"""One graph over buffers of its own: its launches counted, its results compared when it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.cli.bench import timing
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.workload import BF16

AS_COPY = 1.05
Handles = dict[str, rg.tensor]
# Records on a graph whose inputs are there by name, and makes the outputs real, each with a name.
Record = Callable[[rg.pygraph, Handles], object]


class Work:
    """A graph of one launch, which runs when it is called, on ``pack``.

    results: buffers of some outputs; the rest is allocated.  changed: inputs that it writes over.
    idle_bytes: of its buffers, what the launch does not touch; of what is written over, twice.
    Raises AssertionError if it takes more launches, or if anything that it writes is not what
    another engine writes.
    """

    def __init__(
        self,
        name: str,
        inputs: Mapping[str, Tensor],
        record: Record,
        *,
        results: Mapping[str, Tensor] | None = None,
        changed: Iterable[str] = (),
        idle_bytes: int = 0,
    ) -> None:
        self.name, self.inputs, self.record, self.changed = name, inputs, record, tuple(changed)
        self.graph = self._graph()
        taken = [step.name for step in self.graph.plan.steps]
        if len(taken) != 1:
            raise AssertionError(f"{name} takes {len(taken)} launches, not one: {taken}")
        self.pack = {**inputs, **self.graph.allocate(), **(results or {})}
        moved = [*self.pack.values(), *(inputs[n] for n in self.changed)]
        self.moved_bytes = sum(x.numel() * x.element_size() for x in moved) - idle_bytes
        self._compare()

    def __call__(self) -> None:
        self.graph.execute(self.pack)

    def _graph(self, engines: str | None = None) -> rg.pygraph:
        graph = rg.pygraph(self.name, io_data_type=BF16, engines=engines)
        self.record(graph, {n: graph.tensor_like(x, name=n) for n, x in self.inputs.items()})
        graph.build()
        return graph

    def _compare(self) -> None:
        ran = {step.engine for step in self.graph.plan.steps}
        engine = "reference" if "torch" in ran else "torch"
        other = self._graph(engine)
        theirs = {**self.inputs, **other.allocate()}
        theirs |= {n: self.inputs[n].clone() for n in self.changed}
        made = [n for n in self.pack if n not in self.inputs]
        for pack in (self.pack, theirs):
            for n in made:
                pack[n].fill_(torch.nan if pack[n].is_floating_point() else 0xA5)
        other.execute(theirs)
        self()
        for n in (*made, *self.changed):
            if not _is_near(self.pack[n], theirs[n]):
                raise AssertionError(f"{self.name}: {n} is not what the engine {engine} writes")


def _is_near(got: Tensor, want: Tensor) -> bool:
    """Equal bytes; of numbers within one place of their type, or what fp32 loses in a sum."""
    if not got.is_floating_point():
        return torch.equal(got, want)
    place = max(torch.finfo(got.dtype).eps, 2.0**-14)
    got, want = got.float(), want.float()
    allowed = place * want.abs() + 2.0**-16 * want.abs().max()
    return bool(((got - want).abs() <= allowed).all())


def copy_of(work: Work) -> timing.Call:
    """A device copy that moves as many bytes: half of them, read and written."""
    device = next(iter(work.pack.values())).device
    source = torch.randint(256, (work.moved_bytes // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def ratio(what: str, works: Mapping[str, timing.Call], target: float | None) -> Row:
    """A row of the first work over the second, all of them timed in turn."""
    return Row.of_ratio(what, timing.device_in_turn(works, timing.RATIO_ROUNDS), target)


def beside_copy(what: str, work: Work, target: float | None = AS_COPY) -> Row:
    """A row of a work over a copy of the bytes that it must move."""
    return ratio(f"{what}, beside a copy", {"ours": work, "copy": copy_of(work)}, target)
