"""verify() of q_rot, k_rot and stats: products, splits, what cannot be told, and how it is said."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.api.scale_fit import rounding
from tests.api.graphs import F32, attention, buffers, new

Pack = dict[str, Any]


def pair(**options: Any) -> tuple[rg.pygraph, rg.pygraph, Pack, Pack]:
    """Forward, backward, the forward's pack, executed, and the backward's."""
    forward = attention(**options)
    back = forward.backward_graph(outputs=["o"], inputs=["q", "k", "v"])
    ahead = buffers(forward)
    forward.execute(ahead)
    behind = buffers(back)
    behind |= {name: ahead[name] for name in back.saved}
    return forward, back, ahead, behind


def scales(found: Any) -> dict[str, Any]:
    return {s.what: s for s in found.scales}


PRODUCT = "product: q_rot, k_rot"
FOLDS = [
    ({"fold": "off"}, 0.3, 1.0, 1.0),
    ({"fold": "q"}, 1.0, 0.3, 1.0),
    ({"fold": "symmetric"}, 1.0, math.sqrt(0.3), math.sqrt(0.3)),
    ({"fold": "q", "fold_log2": True}, math.log(2), 0.3 / math.log(2), 1.0),
]


@pytest.mark.parametrize(("settings", "rest", "on_q", "on_k"), FOLDS)
def test_the_scales_of_the_fold_table_are_found(
    settings: Any, rest: float, on_q: float, on_k: float
):
    forward, back, ahead, behind = pair(settings=settings)
    raw = {"q_rot": ahead["q"], "k_rot": ahead["k"]}
    for found in (forward.verify(ahead), back.verify(behind, raw=raw)):
        assert found.is_ok, str(found)
        for what, want in ((PRODUCT, rest), ("split: q_rot", on_q), ("split: k_rot", on_k)):
            check = scales(found)[what]
            assert check.expected == pytest.approx(want, rel=1e-12)
            assert check.found == pytest.approx(want, rel=1e-5)
            assert f"{want:.6g}"[:6] in str(check)


def test_a_backward_that_reads_rows_folded_otherwise():
    _, back, _, _ = pair(settings={"fold": "q"})
    _, _, ahead, behind = pair(settings={"fold": "off"})
    found = back.verify(behind, raw={"q_rot": ahead["q"], "k_rot": ahead["k"]})
    assert not found.is_ok
    assert [s.what for s in found.wrong_scales] == [PRODUCT, "split: q_rot"]
    assert scales(found)[PRODUCT].found == pytest.approx(0.3, rel=1e-4)
    assert scales(found)["split: q_rot"].found == pytest.approx(1.0, rel=1e-5)
    assert str(found).count("WRONG FOLD") == 2
    assert found.verdict.startswith(
        "WRONG: attn_backward: split: q_rot: 1 is carried, the graph wants 0.3; what reads"
    )
    assert not found


def test_a_wrong_split_has_a_right_product():
    _, back, ahead, behind = pair(settings={"fold": "q"})
    behind |= {"q_rot": behind["q_rot"] * 2, "k_rot": behind["k_rot"] / 2}
    assert not back.verify(behind).wrong_scales
    found = back.verify(behind, raw={"q_rot": ahead["q"], "k_rot": ahead["k"]})
    assert [s.what for s in found.wrong_scales] == ["split: q_rot", "split: k_rot"]
    assert scales(found)["split: k_rot"].found == pytest.approx(0.5)


def test_without_raw_rows_the_split_is_unchecked():
    _, back, ahead, behind = pair(settings={"fold": "q"})
    found = back.verify(behind)
    assert found
    assert "split: q_rot unchecked: the raw rows" in str(found)
    assert "not checked: attn_backward: split: q_rot, attn_backward: split: k_rot" in found.verdict
    half = back.verify(behind, raw={back.find_tensor("q_rot"): ahead["q"]})
    assert not scales(half)["split: q_rot"].unchecked
    assert scales(half)["split: k_rot"].unchecked


def test_rows_of_another_tensor_are_not_taken_for_a_scale():
    _, back, ahead, behind = pair()
    found = back.verify(behind, raw={"q_rot": torch.randn_like(ahead["q"])})
    assert "no multiple of the raw rows" in str(found)
    assert not found.is_ok


def test_stats_of_another_batch():
    _, back, _, behind = pair()
    found = back.verify(behind | {"stats": behind["stats"].flip(0).contiguous()})
    assert not found.is_ok
    assert "no scale explains them" in str(scales(found)[PRODUCT])
    nan = behind["stats"].clone()
    nan[0, 0, 0] = torch.nan
    found = back.verify(behind | {"stats": nan})
    assert "1 rows are NaN or Inf" in str(scales(found)[PRODUCT])
    assert found.nonfinite_origin == "input 'stats'"


@pytest.mark.parametrize("side", ["q", "k"])
def test_where_every_logit_is_zero_nothing_is_flagged(side: str):
    forward, back, ahead, behind = pair(settings={"fold": "q"})
    ahead[side].zero_()
    forward.execute(ahead)
    for found in (forward.verify(ahead), back.verify(behind)):
        assert found.is_ok, str(found)
        assert "product: q_rot, k_rot unchecked: no row" in str(found)
    assert "split: %s_rot unchecked: its rows are zero" % side in str(forward.verify(ahead))  # noqa: UP031


def test_few_rows_are_checked_to_what_they_tell():
    forward, _, ahead, _ = pair(settings={"fold": "q"})
    check = forward.verify(ahead).scales[0]
    assert check.is_ok
    assert not check.unchecked
    assert not check.is_sharp
    assert 2.6 * 2**-24 < check.tolerance < 1e-6
    assert str(check).endswith("more than four roundings")


def test_where_the_logits_hardly_matter_it_says_how_little_they_tell():
    forward, _, ahead, _ = pair(settings={"fold": "q"})
    ahead["q"].mul_(1e-7)
    found = forward.verify(ahead)
    assert found.is_ok
    assert "the numbers tell the scale to" in scales(found)[PRODUCT].unchecked


def test_rows_that_see_nothing_say_nothing():
    options = {"use_causal_mask_bottom_right": True}
    g = new(fold="q")
    q, k, v = g.tensor((1, 2, 9, 8), name="q"), *(g.tensor((1, 2, 4, 8), name=n) for n in "kv")
    f = g.tensor((9, 1, 1, 8), data_type=F32, name="f")
    o, stats = g.sdpa(g.rope(q, f), g.rope(k, f), v, attn_scale=0.5, generate_stats=True, **options)
    o.set_output(True).set_name("o"), stats.set_output(True).set_name("stats")
    pack = buffers(g)
    found = g.verify(pack)
    assert bool((pack["stats"] == -torch.inf).any())
    assert found.is_ok, str(found)
    assert not found.scales[0].unchecked


MASKS: dict[str, dict[str, Any]] = {
    "causal": {"use_causal_mask": True},
    "window": {"diagonal_band_right_bound": 0, "diagonal_band_left_bound": 3},
    "alibi": {"use_alibi_mask": True, "use_causal_mask": True},
}


@pytest.mark.parametrize("name", list(MASKS))
@pytest.mark.parametrize("settings", [f[0] for f in FOLDS])
def test_masks_are_part_of_the_sum(name: str, settings: Any):
    _, back, ahead, behind = pair(settings=settings, **MASKS[name])
    raw = {"q_rot": ahead["q"], "k_rot": ahead["k"]}
    assert back.verify(behind, raw=raw).is_ok
    wrong = back.verify(behind | {"q_rot": behind["q_rot"] * 1.01})
    assert [s.what for s in wrong.wrong_scales] == [PRODUCT]
    assert wrong.wrong_scales[0].found == pytest.approx(
        wrong.wrong_scales[0].expected / 1.01, rel=1e-4
    )


def test_softcap_bias_and_sink_are_part_of_the_sum():
    g = new(fold="q")
    q, k, v = (g.tensor((2, 4, 12, 16), name=n) for n in "qkv")
    f = g.tensor((12, 1, 1, 16), data_type=F32, name="f")
    o, stats = g.sdpa(
        g.rope(q, f).set_name("q_rot"),
        g.rope(k, f).set_name("k_rot"),
        v,
        attn_scale=0.25,
        bias=g.tensor((1, 4, 12, 12), name="bias"),
        sink_token=g.tensor((1, 4, 1, 1), data_type=F32, name="sink"),
        softcap=5.0,
        generate_stats=True,
    )
    o.set_output(True).set_name("o"), stats.set_output(True).set_name("stats")
    back = g.backward_graph(outputs=["o"], inputs=["q", "k", "v"])
    ahead = buffers(g)
    found = g.verify(ahead)
    assert found.is_ok, str(found)
    assert not [s for s in found.scales if s.unchecked]
    behind = buffers(back) | {name: ahead[name] for name in back.saved}
    assert back.verify(behind).is_ok
    wrong = back.verify(behind | {"k_rot": behind["k_rot"] * 0.99})
    assert [s.what for s in wrong.wrong_scales] == [PRODUCT]


def test_a_forward_without_stats_has_no_product():
    g = attention(generate_stats=False)
    found = scales(g.verify(buffers(g)))
    assert found[PRODUCT].unchecked == "no stats are computed here"
    assert not found["split: q_rot"].unchecked
    plain = attention(rotated=False, generate_stats=False)
    assert plain.verify(buffers(plain)).scales == ()


def test_a_rounding_is_half_of_eps():
    assert rounding(torch.bfloat16) == 2**-8
    assert rounding(torch.float16) == 2**-11
    assert rounding(torch.float32) == 2**-24
    assert rounding(torch.float64) == 2**-53


def test_bad_raw_rows_are_refused():
    forward, back, ahead, behind = pair()
    with pytest.raises(rg.GraphError, match=r"raw rows are given for 'v'; .* q_rot, k_rot"):
        back.verify(behind, raw={"v": ahead["v"]})
    with pytest.raises(rg.GraphError, match="'q_rot' are int; use a floating tensor"):
        back.verify(behind, raw={"q_rot": 3})
    with pytest.raises(rg.GraphError, match=r"'q_rot' are \[1, 6, 5, 8\]; 'rope_q_backward' says"):
        back.verify(behind, raw={"q_rot": ahead["q"][:1]})
    with pytest.raises(rg.GraphError, match="verify: raw is list"):
        back.verify(behind, raw=[ahead["q"]])  # pyright: ignore[reportArgumentType]
    with pytest.raises(rg.GraphError, match="'raw_q' names no tensor"):
        back.verify(behind, raw={"raw_q": ahead["q"]})
    with pytest.raises(rg.GraphError, match="nothing: no sdpa_backward"):
        forward.verify(ahead, raw={"q": ahead["q"]})


def test_the_parts_of_a_merged_launch_have_errors_of_their_own():
    forward, back, ahead, behind = pair(settings={"fold": "q"})
    assert list(forward.verify(ahead).by_node) == ["rope_q", "rope_k", "attn"]
    nodes = back.verify(behind).by_node
    assert set(nodes) == {"attn_backward", "rope_q_backward", "rope_k_backward"}
    assert all(0 < n.rms_ulp <= n.max_ulp and n.nonfinite == 0 for n in nodes.values())


def test_where_an_inf_comes_from():
    forward, _, ahead, _ = pair()
    assert forward.verify(ahead).nonfinite_origin == ""
    ahead["k"][0, 0, 1, 2] = torch.inf
    found = forward.verify(ahead)
    assert found.nonfinite_inputs == ("k",)
    assert "first NaN or Inf: input 'k'" in str(found)


def test_an_overflow_is_where_an_inf_comes_from():
    g = rg.pygraph(io_data_type=torch.float16)
    x, f = g.tensor((1, 2, 5, 8), name="x"), g.tensor((5, 1, 1, 8), data_type=F32, name="f")
    g.rope(x, f, output_scale=8.0, name="turn").set_output(True).set_name("y")
    pack = buffers(g)
    pack["x"][0, 0, 0] = 60000.0
    found = g.verify(pack)
    assert found.nonfinite_inputs == ()
    assert found.nonfinite_origin == "turn: y"


def table(layout: str, rows: int = 5, half: int = 4) -> Tensor:
    angles = torch.arange(rows)[:, None] * 0.1 ** torch.arange(half)
    whole = {
        "first_half": torch.cat([angles, angles], 1),
        "pairs": angles.repeat_interleave(2, dim=1),
        "zeros": torch.cat([angles, torch.zeros_like(angles)], 1),
        "full": torch.cat([angles, angles + 1], 1),
    }[layout]
    return whole[:, None, None, :].float()


@pytest.mark.parametrize(
    ("read_by", "given", "said"),
    [
        ("first_half", "first_half", ""),
        ("first_half", "zeros", ""),
        ("first_half", "pairs", 'it looks like "pairs"'),
        ("first_half", "full", 'is it "full"?'),
        ("pairs", "pairs", ""),
        ("pairs", "first_half", 'it looks like "first_half"'),
        ("full", "full", ""),
        ("full", "pairs", ""),
    ],
)
def test_a_table_that_does_not_look_like_its_layout(read_by: str, given: str, said: str):
    g = new()
    x, f = g.tensor((1, 2, 5, 8), name="x"), g.tensor((5, 1, 1, 8), name="f")
    g.rope(x, f, table_layout=read_by, name="turn").set_output(True).set_name("y")
    found = g.verify(
        {"x": torch.randn(1, 2, 5, 8), "f": table(given), "y": torch.empty(1, 2, 5, 8)}
    )
    assert found.is_ok
    if not said:
        assert found.warnings == ()
        return
    (warning,) = found.warnings
    assert warning.startswith(f"'turn' reads 'f' by table_layout=\"{read_by}\"")
    assert said in warning
    assert f"warning: {warning}" in str(found)


def test_packed_tables_are_looked_at_half_by_half():
    for given, count in (("first_half", 0), ("pairs", 1)):
        g = new()
        x = g.tensor((1, 2, 5, 8), name="x")
        both = torch.cat([table(given).cos(), table(given).sin()], dim=3)
        t = g.tensor(both.shape, data_type=F32, name="t")
        g.rope(x, cos_sin=t, name="turn").set_output(True).set_name("y")
        found = g.verify({"x": torch.randn(1, 2, 5, 8), "t": both, "y": torch.empty(1, 2, 5, 8)})
        assert len(found.warnings) == count
