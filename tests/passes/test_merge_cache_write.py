"""V goes into its cache in the launch that turns K into its own; what stays apart, and why."""

from dataclasses import replace
from typing import Any

import pytest

from ropegraph.dtypes import DType
from ropegraph.errors import InternalError
from ropegraph.ir.graph import Graph
from ropegraph.ir.ops import CacheWrite, Op, Rope, RopePair
from ropegraph.ir.verify import verify
from ropegraph.passes import pipeline
from ropegraph.passes.merge_cache_write import merge_cache_write
from ropegraph.passes.merge_lone_ropes import merge_lone_ropes
from ropegraph.passes.merge_rope_qk import merged
from ropegraph.passes.rewrite import Decline
from tests.ir.build import Build
from tests.passes.text import declines, done, nodes, run


class Caches(Build):
    """Writes of k and v, 3 rows each, into k_cache and v_cache at ``rows``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name in "kv":
            self.tensor(name, 2, 2, 3, 8)
            self.tensor(f"{name}_cache", 2, 2, 9, 8)
        self.tensor("freqs", 16, 1, 1, 8)
        self.tensor("rows", 2, dtype=DType.INT32)

    def write(
        self, name: str, x: str, cache: str, out: str, op: Op | None = None, rows: str = "rows"
    ) -> None:
        op = CacheWrite() if op is None else op
        ports = {"input": x, **({} if isinstance(op, CacheWrite) else {"freqs": "freqs"})}
        self.node(name, op, {**ports, "cache": cache, "cache_positions": rows}, {"output": out})
        kept = self.values[cache]
        value = replace(self.values[out], dtype=kept.dtype, within=kept.within or cache)
        self.values[out] = value

    def both(self, rows: str = "rows") -> Graph:
        self.write("turn", "k", "k_cache", "k2", Rope(8, 0))
        self.write("keep", "v", "v_cache", "v2", rows=rows)
        return self.graph()

    def others(self, *numbers: int) -> None:
        """v into more caches, as it is."""
        for i in numbers:
            self.tensor(f"cache{i}", 2, 2, 9, 8)
            self.write(f"keep{i}", "v", f"cache{i}", f"v{i}")


def test_k_and_v() -> None:
    g = Caches().both()
    (line,) = nodes(run(merge_cache_write, g))
    assert line == (
        "k2, v2 = rope_pair 'turn+keep' (input0=k, freqs0=freqs, cache0=k_cache, "
        "cache_positions0=rows, input1=v, cache1=v_cache, cache_positions1=rows, "
        "[rope_dim=8; rope_offset=0; output_scale=1], [cache_write])"
    )
    assert done(merge_cache_write, g) == ["keep: one launch for turn and keep"]


def test_q_k_and_v_by_all_passes() -> None:
    b = Caches()
    b.tensor("q", 2, 6, 3, 8)
    b.node("turn_q", Rope(8, 0), {"input": "q", "freqs": "freqs"}, {"output": "q2"})
    b.both()
    b.sdpa("attn", "q2", "k2", "v2", attn_scale=0.25)
    final = pipeline.run(b.graph("o"))[-1].graph
    assert [node.name for node in final.nodes] == ["turn_q+turn+keep", "attn"]
    (pair, _) = final.nodes
    assert isinstance(pair.attrs, RopePair)
    assert pair.attrs.names == ("turn_q", "turn", "keep")
    assert [single.name for single in final.singles] == ["turn_q", "turn", "keep", "attn"]


@pytest.mark.parametrize("difference", ["rows", "types", "nobody"])
def test_what_stays_apart(difference: str) -> None:
    b, reason = Caches(), "nothing else writes into a cache at the same cache_positions"
    if difference == "rows":
        b.tensor("others", 2, dtype=DType.INT32)
        g = b.both("others")
    elif difference == "types":
        b.values["v_cache"] = replace(b.values["v_cache"], dtype=DType.HALF)
        g = b.both()
        reason = "'turn' reads fp32 and writes fp32, 'keep' reads fp32 and writes fp16"
    else:
        b.write("keep", "v", "v_cache", "v2")
        g = b.graph()
    assert declines(merge_cache_write, g) == {"keep": reason}


def test_one_that_waits_for_the_other() -> None:
    b = Caches()
    b.write("first", "v", "k_cache", "once")
    b.write("turn", "k", "once", "twice", Rope(8, 0))
    assert declines(merge_cache_write, b.graph()) == {
        "first": "one of 'first' and 'turn' needs the other's result"
    }


def test_rows_of_two_types_are_two_launches() -> None:
    b = Caches()
    b.tensor("wide", 2, dtype=DType.INT64)
    b.write("turn_k", "k", "k_cache", "k2", Rope(8, 0))
    b.write("turn_v", "v", "v_cache", "v2", Rope(8, 0), rows="wide")
    reason = merge_lone_ropes.apply(b.graph(), b.nodes[0])
    assert reason is None
    first, second = b.nodes
    assert merged(b.graph(), first, second) == Decline("cache_positions are int32 and int64")


def test_four_parts_are_two_launches() -> None:
    b = Caches()
    b.both()
    b.others(3, 4)
    after, decisions = merge_cache_write.run(b.graph())
    assert {node.name for node in after.nodes} == {"turn+keep+keep3", "keep4"}
    assert [d.text for d in decisions if not d.applied] == ["'turn+keep+keep3' has 3 parts already"]


def test_what_a_write_returns_lies_in_its_cache() -> None:
    g = Caches().both()
    verify(g, after="record")
    values = {n: replace(v, within=None) if n == "v2" else v for n, v in g.values.items()}
    with pytest.raises(InternalError, match="'keep' writes 'v2', which is not its cache 'v_cache'"):
        verify(replace(g, values=values), after="record")
