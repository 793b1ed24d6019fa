"""K and V go into their caches in one launch, a rotation or not; what stays apart, and why."""

from dataclasses import replace
from typing import Any

import pytest

from ropegraph.dtypes import DType
from ropegraph.errors import InternalError
from ropegraph.ir.graph import Graph
from ropegraph.ir.ops import CacheWrite, Op, RmsNorm, Rope, RopePair
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
    for i in (3, 4):
        b.tensor(f"cache{i}", 2, 2, 9, 8)
        b.write(f"keep{i}", "v", f"cache{i}", f"v{i}")
    after, decisions = merge_cache_write.run(b.graph())
    assert {node.name for node in after.nodes} == {"turn+keep+keep3", "keep4"}
    assert [d.text for d in decisions if not d.applied] == ["'turn+keep+keep3' has 3 parts already"]


class Written(Caches):
    """Writes of k and v as they are."""

    def kept(self, rows: str = "rows", **cache: Any) -> Graph:
        self.write("keep_k", "k", "k_cache", "k2")
        self.values["v_cache"] = replace(self.values["v_cache"], **cache)
        self.write("keep_v", "v", "v_cache", "v2", rows=rows)
        return self.graph()


def test_k_and_v_without_a_rotation() -> None:
    g = Written().kept()
    (line,) = nodes(run(merge_cache_write, g))
    assert line == (
        "k2, v2 = rope_pair 'keep_k+keep_v' (input0=k, cache0=k_cache, cache_positions0=rows, "
        "input1=v, cache1=v_cache, cache_positions1=rows, [cache_write], [cache_write])"
    )
    assert done(merge_cache_write, g) == ["keep_k: one launch for keep_k and keep_v"]


def test_heads_and_widths_of_their_own() -> None:
    b = Caches()
    b.tensor("wide", 2, 5, 3, 16), b.tensor("wide_cache", 2, 5, 7, 16)
    b.write("keep_k", "k", "k_cache", "k2")
    b.write("keep_v", "wide", "wide_cache", "v2")
    (pair,) = run(merge_cache_write, b.graph()).nodes
    assert pair.attrs == RopePair((CacheWrite(), CacheWrite()), ("keep_k", "keep_v"))


@pytest.mark.parametrize("numerics", ["fp32", "hf"])
def test_norms_then_caches_by_all_passes(numerics: Any) -> None:
    """As Qwen3 decodes: norms and rotations, caches, attention; more launches if not fused."""
    b = Caches()
    b.tensor("q", 2, 6, 3, 8), b.tensor("w", 1, 1, 1, 8)
    b.tensor("cos", 16, 1, 1, 8), b.tensor("sin", 16, 1, 1, 8)
    is_hf = numerics == "hf"
    tables = {"cos": "cos", "sin": "sin"} if is_hf else {"freqs": "freqs"}
    op = Rope(8, 0, numerics=numerics, angles="cos_sin" if is_hf else "freqs")
    for x in "qk":
        b.node(f"norm_{x}", RmsNorm(), {"input": x, "scale": "w"}, {"Y": f"{x}_norm"})
        b.node(f"turn_{x}", op, {"input": f"{x}_norm", **tables}, {"output": f"{x}_rot"})
    b.write("keep_k", "k_rot", "k_cache", "k2")
    b.write("keep_v", "v", "v_cache", "v2")
    b.sdpa("attn", "q_rot", "k2", "v2", attn_scale=0.25)
    final = pipeline.run(b.graph("o"))[-1].graph
    turned = ["norm_q+turn_q+norm_k+turn_k"]
    if is_hf:
        turned = ["norm_q", "norm_k", "turn_q+turn_k"]
    assert sorted(n.name for n in final.nodes) == sorted([*turned, "keep_k+keep_v", "attn"])


def test_a_rotation_comes_before_another_write() -> None:
    """Whatever is recorded first; a second pair takes what is left."""
    b = Caches()
    for i in (1, 2, 3, 4):
        b.tensor(f"cache{i}", 2, 2, 9, 8)
        b.write(f"keep{i}", "v", f"cache{i}", f"v{i}")
    b.write("turn", "k", "k_cache", "k2", Rope(8, 0))
    after = run(merge_cache_write, b.graph())
    assert [n.name for n in after.nodes] == ["turn+keep1+keep2", "keep3+keep4"]


def test_three_writes_and_one_more() -> None:
    b = Caches()
    for i in (1, 2, 3, 4):
        b.tensor(f"cache{i}", 2, 2, 9, 8)
        b.write(f"keep{i}", "v", f"cache{i}", f"v{i}")
    after, decisions = merge_cache_write.run(b.graph())
    assert {node.name for node in after.nodes} == {"keep1+keep2+keep3", "keep4"}
    (text,) = (d.text for d in decisions if not d.applied)
    assert text == "'keep1+keep2+keep3' has 3 parts already"


@pytest.mark.parametrize("difference", ["rows", "types"])
def test_writes_that_stay_apart(difference: str) -> None:
    b = Written()
    if difference == "rows":
        b.tensor("others", 2, dtype=DType.INT32)
        g, reason = b.kept("others"), "nothing else writes into a cache at the same cache_positions"
        reasons = {"keep_k": reason, "keep_v": reason}
    else:
        g = b.kept(dtype=DType.HALF)
        read = "'keep_{}' reads fp32 and writes fp{}".format
        reasons = {
            "keep_k": f"{read('v', 16)}, {read('k', 32)}",
            "keep_v": f"{read('k', 32)}, {read('v', 16)}",
        }
    assert declines(merge_cache_write, g) == reasons


@pytest.mark.parametrize("how", ["cache", "reader"])
def test_a_write_that_waits_for_the_other(how: str) -> None:
    b = Caches()
    b.write("first", "k", "k_cache", "once")
    if how == "cache":
        b.write("second", "v", "once", "twice")
    else:
        b.sdpa("attn", "k", "once", "once", attn_scale=0.25)
        b.write("second", "o", "v_cache", "v2")
    after = "one of {!r} and {!r} needs the other's result"
    assert declines(merge_cache_write, b.graph("o" if how == "reader" else "once")) == {
        "first": after.format("first", "second"), "second": after.format("second", "first"),
    }  # fmt: skip


@pytest.mark.parametrize("op", [CacheWrite(), Rope(8, 0)])
def test_memory_that_orders_them_though_no_edge_does(op: Op) -> None:
    """No recorded graph is like that; a file may hold one."""
    b = Caches()
    b.write("first", "k", "k_cache", "k2", op)
    b.write("second", "v", "k_cache", "v2")
    found = declines(merge_cache_write, b.graph())
    assert found["second"] == "'first' uses 'k_cache', which 'second' writes over"
    b = Caches()
    b.write("first", "k", "k_cache", "k2", op)
    b.tensor("room", 2, 2, 12, 8)
    b.write("second", "k_cache", "room", "v2")
    found = declines(merge_cache_write, b.graph())
    assert found["second"] == "'second' uses 'k_cache', which 'first' writes over"


def test_a_reader_of_what_is_written_over_stands_between() -> None:
    """It needs what one wrote, and the cache as it was before the other: none may come first."""
    b = Caches()
    b.write("keep_k", "k", "k_cache", "k2")
    b.sdpa("attn", "k", "k2", "v_cache", attn_scale=0.25)
    b.write("keep_v", "v", "v_cache", "v2")
    reason = "'v_cache', which 'keep_v' writes over, is read by ['attn']"
    assert declines(merge_cache_write, b.graph("o")) == {"keep_k": reason, "keep_v": reason}


def test_what_a_write_returns_lies_in_its_cache() -> None:
    g = Caches().both()
    verify(g, after="record")
    values = {n: replace(v, within=None) if n == "v2" else v for n, v in g.values.items()}
    with pytest.raises(InternalError, match="'keep' writes 'v2', which is not its cache 'v_cache'"):
        verify(replace(g, values=values), after="record")
