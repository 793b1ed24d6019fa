"""K and V go into their caches in one launch as they are; what stays apart, and why."""

from dataclasses import replace
from typing import Any

import pytest

from ropegraph.dtypes import DType
from ropegraph.ir.graph import Graph
from ropegraph.ir.ops import CacheWrite, Op, RmsNorm, Rope, RopePair
from ropegraph.passes import pipeline
from ropegraph.passes.merge_cache_write import merge_cache_write
from tests.passes.test_merge_cache_write import Caches
from tests.passes.text import declines, done, nodes, run


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
    b.tensor("wide", 2, 5, 3, 16)
    b.tensor("wide_cache", 2, 5, 7, 16)
    b.write("keep_k", "k", "k_cache", "k2")
    b.write("keep_v", "wide", "wide_cache", "v2")
    (pair,) = run(merge_cache_write, b.graph()).nodes
    assert pair.attrs == RopePair((CacheWrite(), CacheWrite()), ("keep_k", "keep_v"))


@pytest.mark.parametrize("numerics", ["fp32", "hf"])
def test_norms_then_caches_by_all_passes(numerics: Any) -> None:
    """As Qwen3 decodes: norms and rotations, caches, attention; more launches if not fused."""
    b = Caches()
    b.tensor("q", 2, 6, 3, 8)
    b.tensor("w", 1, 1, 1, 8)
    for table in ("cos", "sin"):
        b.tensor(table, 16, 1, 1, 8)
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
    b.others(1, 2, 3, 4)
    b.write("turn", "k", "k_cache", "k2", Rope(8, 0))
    after = run(merge_cache_write, b.graph())
    assert [n.name for n in after.nodes] == ["turn+keep1+keep2", "keep3+keep4"]


def test_three_writes_and_one_more() -> None:
    b = Caches()
    b.others(1, 2, 3, 4)
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
