"""str(graph) is a line a node, and every diagram names what the caller binds."""

from dataclasses import replace

import pytest

from ropegraph.dtypes import DType
from ropegraph.ir.mermaid import to_mermaid
from ropegraph.ir.ops import Op, Rope, RopePair, Scale, Sdpa, Sum
from ropegraph.ir.printer import describe
from ropegraph.ir.score_mod import softcap
from ropegraph.passes import pipeline
from tests.ir.build import Build, forward


def everything() -> Build:
    b = Build(DType.BFLOAT16, fold="symmetric", fold_log2=True)
    b.tensor("q", 2, 6, 5, 8)
    b.tensor("k", 2, 2, 7, 8, ragged_offset="starts")
    b.tensor("starts", 3, 1, 1, 1, dtype=DType.INT32)
    b.rope("rope_q", "q", "q_rot", output_scale=0.1, rope_dim=4, rope_offset=4, inverse=True)
    b.sdpa("attn", "q_rot", "k", "k", stats="st", attn_scale=1 / 3, right_bound=0, alibi=True)
    return b


def test_the_whole_text():
    assert str(everything().graph("o", saved=["st"], name="mine")).split("\n") == [
        "graph 'mine' fold=symmetric fold_log2=True",
        "  q: bf16 [2, 6, 5, 8]",
        "  freqs4: fp32 [16, 1, 1, 4]",
        "  k: bf16 [2, 2, 7, 8] ragged by starts",
        "  starts: int32 [3, 1, 1, 1]",
        (
            "  q_rot: bf16 [2, 6, 5, 8] = rope 'rope_q' (input=q, freqs=freqs4, rope_dim=4, "
            "rope_offset=4, output_scale=0.1, inverse=True)"
        ),
        (
            "  o*: bf16 [2, 6, 5, 8], st+: bf16 [2, 6, 5, 1] = sdpa 'attn' (q=q_rot, k=k, v=k, "
            "attn_scale=0.333333333333, right_bound=0, alibi=True)"
        ),
    ]


def test_the_same_graph_gives_the_same_text():
    texts = {str(everything().graph("o", saved=["st"])) for _ in range(3)}
    assert len(texts) == 1


def test_a_merged_launch_shows_both_parts():
    after = pipeline.run(forward().graph("o"))[-1].graph
    assert str(after).split("\n")[-2] == (
        "  q_rot: fp32 [2, 6, 5, 8], k_rot: fp32 [2, 2, 7, 8] = rope_pair 'rope_q+rope_k' "
        "(input0=q, freqs0=freqs, input1=k, freqs1=freqs, "
        "[rope_dim=8; rope_offset=0; output_scale=0.25], "
        "[rope_dim=8; rope_offset=0; output_scale=1])"
    )


@pytest.mark.parametrize(
    ("op", "want"),
    [
        (Scale(0.5), ["factor=0.5"]),
        (Sum(), []),
        (Sdpa(), ["attn_scale=1"]),
        (Sdpa(attn_scale=None), ["attn_scale=None"]),
        (Sdpa(attn_scale=1e-13), ["attn_scale=1e-13"]),
        (Sdpa(softmax_input_is_log2=True), ["attn_scale=1", "softmax_input_is_log2=True"]),
        (
            Rope(4, 0, numerics="hf", compute=DType.DOUBLE),
            ["rope_dim=4", "rope_offset=0", "output_scale=1", "numerics=hf",
             "compute=fp64"],
        ),
    ],
)  # fmt: skip
def test_scales_are_always_shown_and_defaults_are_not(op: Op, want: list[str]):
    assert describe(op) == want


def test_a_score_mod_is_shown():
    (scale, program) = describe(Sdpa(score_mod=softcap(30.0)))
    assert scale == "attn_scale=1"
    assert "tanh" in program
    assert "30.0" in program


def test_the_diagram_of_a_graph():
    text = to_mermaid(forward().graph("o", saved=["k_rot"]))
    lines = [line.strip() for line in text.split("\n")]
    assert lines[0] == "flowchart LR"
    boxes = [line.split("[", 1)[1] for line in lines if "[" in line and "(" not in line]
    assert boxes == [
        '"q<br/>fp32 2 x 6 x 5 x 8"]:::user',
        '"freqs<br/>fp32 16 x 1 x 1 x 8"]:::user',
        '"k<br/>fp32 2 x 2 x 7 x 8"]:::user',
        '"v<br/>fp32 2 x 3 x 7 x 4"]:::user',
        '"k_rot<br/>fp32 2 x 2 x 7 x 8"]:::saved',
        '"o<br/>fp32 2 x 6 x 5 x 4"]:::user',
    ]
    assert 'n0 -->|"q_rot"| n2' in lines
    assert 'n1 -->|"k_rot<br/>saved"| n2' in lines
    assert [line for line in lines if "(sdpa)" in line] == [
        'n2["attn (sdpa)<br/>───────<br/>attn_scale=0.25"]:::op'
    ]


def test_the_diagram_after_folding_marks_what_changed():
    trace = pipeline.run(forward(attn_scale=0.5).graph("o"))
    text = to_mermaid(trace[-1].graph, before=trace[0].graph)
    assert ":::scaled" in text
    assert "output_scale=0.5" in text
    unchanged = pipeline.run(forward(attn_scale=1.0).graph("o"))
    assert ":::scaled" not in to_mermaid(unchanged[-1].graph, before=unchanged[0].graph)


def test_a_merged_launch_with_plus_signs_in_its_names_is_still_told_apart():
    b = Build(fold="q")
    b.tensor("q", 1, 2, 3, 8), b.tensor("k", 1, 1, 3, 8)
    b.rope("q+pos", "q", "q_rot"), b.rope("k", "k", "k_rot")
    b.sdpa("attn", "q_rot", "k_rot", "k", attn_scale=1.0)
    trace = pipeline.run(b.graph("o"))
    pair = trace[-1].graph.nodes[0]
    assert isinstance(pair.attrs, RopePair)
    assert (pair.name, pair.attrs.names) == ("q+pos+k", ("q+pos", "k"))
    assert ":::scaled" not in to_mermaid(trace[-1].graph, before=trace[0].graph)


def test_quotes_in_names_do_not_end_a_label():
    b = Build()
    b.tensor('x"y', 1, 1, 2, 4)
    b.scale('say "s"', 'x"y', "z", 2.0)
    graph = replace(b.graph("z"), name='"')
    for line in to_mermaid(graph).split("\n"):
        assert line.count('"') in (0, 2), line


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("a<b>&c", "a#lt;b#gt;#amp;c"),
        ("#quot;", "#35;quot;"),
        ("`x`", "#96;x#96;"),
        ("a\nb\x1b[2J", "a b [2J"),
        ("\ud800", " "),
        ("<script>", "#lt;script#gt;"),
    ],
)
def test_names_that_mermaid_or_html_would_read_as_their_own(name: str, label: str):
    b = Build()
    b.tensor(name, 1, 1, 2, 4)
    b.scale("twice", name, "z", 2.0)
    text = to_mermaid(b.graph("z"))
    assert f'["{label}<br/>fp32' in text
    assert len(text.encode().splitlines()) == len(to_mermaid(b.graph("z")).split("\n"))
