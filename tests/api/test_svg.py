"""to_svg() and what a notebook shows: valid XML, every box, line and scale, nothing loaded."""

import xml.etree.ElementTree as ET
from typing import Any

import pytest
import torch

import ropegraph as rg
from ropegraph.api.layout import lay_out
from ropegraph.api.svg_text import COLUMNS, columns, wrapped
from ropegraph.ir.picture import COLOURS, picture
from tests.api.graphs import attention, new, rotation

SVG = "{http://www.w3.org/2000/svg}"
FOLDS: list[dict[str, Any]] = [
    {"fold": "off"},
    {"fold": "q"},
    {"fold": "symmetric"},
    {"fold": "q", "fold_log2": True},
    {"fold": "symmetric", "fold_log2": True},
]
Box = tuple[float, float, float, float]


def parsed(text: str) -> ET.Element:
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    return root


def groups(root: ET.Element, kind: str) -> dict[str, ET.Element]:
    return {g.get("data-name", ""): g for g in root.iter(f"{SVG}g") if g.get("class") == kind}


def texts(element: ET.Element) -> list[str]:
    return ["".join(t.itertext()) for t in element.iter(f"{SVG}text")]


def title(element: ET.Element) -> list[str]:
    return (element.findtext(f"{SVG}title") or "").split("\n")


def box(element: ET.Element) -> Box:
    rect = element.find(f"{SVG}rect")
    assert rect is not None
    x, y, w, h = (float(rect.get(n, "")) for n in ("x", "y", "width", "height"))
    return x, y, x + w, y + h


def graphs() -> dict[str, rg.pygraph]:
    found = {f"{s}": attention(settings=s) for s in FOLDS}
    for s in FOLDS:
        forward = attention(settings=s)
        found[f"backward {s}"] = forward.backward_graph(outputs=["o"], inputs=["q", "k", "v"])
    return found | {"long": chain(40)}


def chain(length: int) -> rg.pygraph:
    """x rotated again and again by one table."""
    g = new()
    x, f = g.tensor((1, 2, 5, 8), name="x"), g.tensor((5, 1, 1, 8), name="f")
    for i in range(length):
        x = g.rope(x, f, name=f"turn{i}").set_name(f"x{i}")
    x.set_output(True)
    return g


@pytest.mark.parametrize("stage", ["recorded", "lowered"])
@pytest.mark.parametrize("name", list(graphs()))
def test_every_box_and_every_line_is_drawn(name: str, stage: str):
    g = graphs()[name]
    root = parsed(g.to_svg(stage))
    ir = g.lowered.recorded if stage == "recorded" else g.plan.graph
    drawn = picture(ir, None if stage == "recorded" else g.lowered.recorded)
    shown = {i: (kind, title(e)) for kind in COLOURS for i, e in groups(root, kind).items()}
    assert shown == {b.id: (b.kind, list(b.lines)) for b in drawn.boxes}
    for node in ir.nodes:
        assert any(lines[0].startswith(f"{node.name} (") for _, lines in shown.values())
    for value in (*ir.inputs, *ir.outputs):
        assert any(lines[0] == value for _, lines in shown.values())

    labels = {i: title(e) for i, e in groups(root, "label").items()}
    lines = [
        (g.get("data-from"), g.get("data-to"))
        for g in root.iter(f"{SVG}g")
        if g.get("class") == "line"
    ]
    assert len(lines) == len(set(lines)) == len(drawn.arrows) + len(labels)
    for i, arrow in enumerate(drawn.arrows):
        if arrow.label:
            assert labels[f"e{i}"] == list(arrow.label)
            assert (arrow.source, f"e{i}") in lines
            assert (f"e{i}", arrow.target) in lines
        else:
            assert (arrow.source, arrow.target) in lines


@pytest.mark.parametrize("name", list(graphs()))
def test_nothing_overlaps_and_nothing_is_cut_off(name: str):
    root = parsed(graphs()[name].to_svg("lowered"))
    boxes = [box(g) for kind in (*COLOURS, "label") for g in groups(root, kind).values()]
    for i, (left, top, right, bottom) in enumerate(boxes):
        assert left >= 0
        assert top >= 0
        assert right + 14 <= float(root.get("width", ""))
        assert bottom + 70 <= float(root.get("height", ""))
        for other in boxes[i + 1 :]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top, (
                f"{boxes[i]} and {other}"
            )


def test_a_long_graph_stays_narrow_and_runs_downwards():
    root = parsed(chain(40).to_svg())
    assert float(root.get("width", "")) < 900
    tops = [box(g)[1] for g in groups(root, "op").values()]
    assert len(tops) == 40
    assert tops == sorted(tops)


@pytest.mark.parametrize("settings", FOLDS)
def test_scales_stand_on_the_nodes_and_changed_nodes_are_marked(settings: dict[str, Any]):
    g = attention(settings=settings)
    recorded, lowered = parsed(g.to_svg()), parsed(g.to_svg("lowered"))
    assert not groups(recorded, "scaled")
    marked = {title(e)[0].split(" ")[0] for e in groups(lowered, "scaled").values()}
    assert marked == (set() if settings["fold"] == "off" else {"rope_q+rope_k", "attn"})
    said = " ".join(texts(lowered))
    for node in g.plan.graph.singles:
        scale = getattr(node.attrs, "output_scale", None) or getattr(node.attrs, "attn_scale", None)
        assert f"scale={scale:.12g}" in said
    assert ("softmax_input_is_log2=True" in said) is settings.get("fold_log2", False)


def test_operations_are_bold_and_the_colours_are_those_of_the_flowchart():
    root = parsed(attention(settings={"fold": "q"}).to_svg("lowered"))
    for kind, (fill, stroke) in COLOURS.items():
        for group in groups(root, kind).values():
            rect, first = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
            assert rect is not None
            assert first is not None
            assert (rect.get("fill"), rect.get("stroke")) == (fill, stroke)
            assert (first.get("font-weight") == "bold") is (kind in ("op", "scaled"))


def test_what_the_backward_reads_is_marked_as_saved():
    g = attention()
    back = g.backward_graph(outputs=["o"], inputs=["q", "k", "v"])
    assert "k_rot" in [title(e)[0] for e in groups(parsed(g.to_svg()), "saved").values()]
    names = {title(e)[0] for e in groups(parsed(back.to_svg()), "saved").values()}
    assert names == set(back.saved)


NAMES = [
    "a<b>&c",
    "say \"so\" and 'so'",
    "]]> <!-- <script>alert(1)</script>",
    "größe → ∞ 回転 🙂",
    "e\u0301\u0302 combining",
    "null\x00 bell\x07 \x1b[31m red \ud800 \ufffe",
    "tab\tnew\nline",
    "x" * 300,
    "word " * 60,
    " ",
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_can_be_drawn(name: str):
    g = new(name=name)
    x, f = g.tensor((1, 2, 5, 8), name=name), g.tensor((5, 1, 1, 8), name="f")
    g.rope(x, f, name=name + "!").set_output(True).set_name(name + "?")
    for stage in ("recorded", "lowered"):
        svg = g.to_svg(stage)
        svg.encode("utf-8")
        root = parsed(svg)
        assert not list(root.iter(f"{SVG}script"))
        titles = [
            "\n".join(title(e)) for k in ("user", "op", "scaled") for e in groups(root, k).values()
        ]
        if name.isprintable():
            assert any(t.startswith(f"{name}\n") for t in titles)
            assert any(t.startswith(f"{name}! (") for t in titles)
        for text in texts(root)[1:]:
            assert columns(text) <= COLUMNS


def test_long_lines_are_cut_and_lose_nothing():
    assert wrapped(["short"]) == ["short"]
    assert wrapped(["x" * 100]) == ["x" * 44, "x" * 44, "x" * 12]
    assert wrapped(["回" * 30]) == ["回" * 22, "回" * 8]
    words = "alpha beta gamma delta epsilon zeta eta theta iota kappa"
    assert " ".join(wrapped([words])) == words
    assert max(map(len, wrapped([words]))) <= COLUMNS


def test_it_stands_by_itself():
    svg = attention().to_svg("lowered")
    for word in ("href", "url(", "<style", "<script", "@import", "<image", "<foreignObject"):
        assert word not in svg
    assert svg.count("http") == 1  # the name of the XML namespace
    assert svg == attention().to_svg("lowered")


def test_a_notebook_shows_the_graph_before_and_after_build():
    g = attention()
    before = g._repr_svg_()
    assert before == g.to_svg("recorded")
    g.build()
    assert g._repr_svg_() == g.to_svg("lowered") != before


def test_the_context_manager_is_shown_as_well():
    with rg.Graph(inputs=["x"], outputs=["y"]) as g:
        x = g.tensor((1, 2, 3, 4), data_type=torch.float32, name="x")
        g.scale(x, 2.0, name="twice").set_output(True).set_name("y")
    assert "twice (scale)" in g._repr_svg_()


def test_a_recording_that_is_no_graph_yet_has_no_drawing():
    g = new()
    assert g._repr_svg_() is None
    x, f = g.tensor((1, 2, 5, 8), name="x"), g.tensor((5, 1, 1, 8), name="f")
    g.rope(x, f, name="turn")
    assert g._repr_svg_() is None
    with pytest.raises(rg.GraphError, match="has no output"):
        g.to_svg()
    with pytest.raises(rg.GraphError, match="to_svg: stage"):
        rotation().to_svg("drawn")


def test_looking_changes_nothing():
    g = rotation()
    g._repr_svg_(), g.to_svg("lowered")
    g.rope(g.find_tensor("x"), g.find_tensor("f")).set_output(True).set_name("z")
    g.build()
    assert torch.is_tensor(torch.empty(g.get_workspace_size()))


def test_lines_that_skip_a_layer_go_around_what_stands_there():
    sizes = dict.fromkeys("abcd", (60.0, 20.0))
    layout = lay_out(sizes, [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")])
    stops = layout.waypoints["a", "d"]
    assert len(stops) == 2
    for stop, beside in zip(stops, "bc", strict=True):
        (x, y), (other, same) = layout.centres[stop], layout.centres[beside]
        assert y == same
        assert abs(x - other) > 30


def test_lines_from_one_thing_share_their_way():
    sizes = dict.fromkeys("abcd", (60.0, 20.0))
    layout = lay_out(sizes, [("a", "b"), ("b", "c"), ("c", "d"), ("a", "c"), ("a", "d")])
    one, two = layout.waypoints["a", "c"], layout.waypoints["a", "d"]
    assert (len(one), len(two)) == (1, 2)
    assert two[0] == one[0]


def test_lines_are_untangled():
    sizes = dict.fromkeys(("a", "b", "c", "x", "y", "z"), (20.0, 20.0))
    lines = [("a", "z"), ("b", "y"), ("c", "x")]
    at = {name: x for name, (x, _) in lay_out(sizes, lines).centres.items()}
    above, below = sorted("abc", key=at.__getitem__), sorted("xyz", key=at.__getitem__)
    assert [dict(lines)[name] for name in above] == below
