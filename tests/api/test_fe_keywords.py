"""cuDNN Frontend's keywords: accepted where they mean something or say nothing, else refused."""

from typing import Any

import numpy as np
import pytest
import torch

import ropegraph
from ropegraph import GraphError, attention_implementation, data_type, diagonal_alignment
from tests.api.graphs import F32, X, attention, buffers, new, rotation, run

NOT_SET = data_type.NOT_SET

# Keyword -> FE's default, and a value that would mean something there.
SDPA: dict[str, tuple[Any, Any]] = {
    "block_mask": (None, torch.zeros(1, dtype=torch.uint8)),
    "rng_dump": (None, torch.zeros(1)),
    "score_max": (None, torch.zeros(1)),
    "score_sum_exp": (None, np.zeros(2)),
    "unfuse_fma": (False, True),
    "cu_seq_len_q": (None, torch.zeros(3, dtype=torch.int32)),
    "cu_seq_len_kv": (None, torch.zeros(3, dtype=torch.int32)),
    "stats_use_log2": (False, True),
    "softmax_precision": (None, data_type.HALF),
    "attn_scale_prefolded": (False, True),
    "kv_mask": (None, np.zeros((1, 1, 1, 7))),
    "out_dims": (None, [2, 6, 5, 4]),
}
SDPA_BACKWARD = {
    name: SDPA[name]
    for name in ("rng_dump", "softmax_precision", "attn_scale_prefolded", "out_dims")
}
PYGRAPH: dict[str, tuple[Any, Any]] = {
    "kernel_cache": (None, object()),
    "is_dynamic_shape_enabled": (False, True),
    "is_override_shape_enabled": (False, True),
    "cuda_graph_retention": (None, 5),
    "is_cuda_graph_replay_expected": (False, True),
}
EXECUTE: dict[str, tuple[Any, Any]] = {
    "override_uids": (None, [1]),
    "override_shapes": (None, [[1]]),
    "override_strides": (None, [[1]]),
    "tensor_uids": (None, [1]),
}
# Every keyword of FE 1.32 at its default, and hints at any value.
DEFAULTS: dict[str, Any] = {
    "is_inference": None,
    "attn_scale": None,
    "bias": None,
    "use_alibi_mask": False,
    "use_padding_mask": False,
    "seq_len_q": None,
    "seq_len_kv": None,
    "use_causal_mask": False,
    "use_causal_mask_bottom_right": False,
    "sliding_window_length": None,
    "diagonal_alignment": diagonal_alignment.TOP_LEFT,
    "diagonal_band_left_bound": None,
    "diagonal_band_right_bound": None,
    "dropout": None,
    "paged_attention_k_table": None,
    "paged_attention_v_table": None,
    "paged_attention_max_seq_len_kv": None,
    "max_total_seq_len_q": None,
    "max_total_seq_len_kv": None,
    "compute_data_type": NOT_SET,
    "score_mod": None,
    "sink_token": None,
    "implementation": attention_implementation.AUTO,
}


def refused(call: Any, *parts: str) -> None:
    with pytest.raises(GraphError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def backward(**options: Any) -> ropegraph.pygraph:
    g = new()
    t = {n: g.tensor((1, 2, 3, 8), name=n) for n in ("q", "k", "v", "o", "dO")}
    t["stats"] = g.tensor((1, 2, 3, 1), name="stats")
    grads = g.sdpa_backward(**t, name="attn", **options)
    for grad, name in zip(grads, ("dq", "dk", "dv"), strict=True):
        grad.set_output(True).set_name(name)
    return g


@pytest.mark.parametrize("name", SDPA)
def test_sdpa(name: str):
    default, other = SDPA[name]
    assert attention(**{name: default}).key == attention().key
    refused(lambda: attention(**{name: other}), f"sdpa 'attn': {name}=", "is not supported",
            f"at its default {default!r}")  # fmt: skip


@pytest.mark.parametrize("name", SDPA_BACKWARD)
def test_sdpa_backward(name: str):
    default, other = SDPA_BACKWARD[name]
    assert backward(**{name: default}).key == backward().key
    refused(lambda: backward(**{name: other}), f"sdpa_backward 'attn': {name}=", "not supported")


@pytest.mark.parametrize("name", sorted(set(SDPA) - set(SDPA_BACKWARD)))
def test_keywords_of_the_forward_are_none_of_the_backward(name: str):
    refused(lambda: backward(**{name: SDPA[name][1]}), f"{name}=", "no argument here")


@pytest.mark.parametrize("name", PYGRAPH)
def test_pygraph(name: str):
    default, other = PYGRAPH[name]
    assert rotation(settings={name: default}).key == rotation().key
    refused(lambda: new(name="mine", **{name: other}), f"pygraph 'mine': {name}=", "not supported")
    refused(lambda: ropegraph.Graph(**{name: other}), f"{name}=", "is not supported")


@pytest.mark.parametrize("name", EXECUTE)
def test_execute(name: str):
    default, other = EXECUTE[name]
    g = rotation()
    pack = buffers(g)
    refused(lambda: g.execute(pack, **{name: other}), f"execute: {name}=", "is not supported")
    assert bool(pack["y"].isnan().all())
    g.execute(pack, **{name: default})
    assert not bool(pack["y"].isnan().any())


def test_every_keyword_at_its_default():
    want = run(attention(attn_scale=None))
    got = run(attention(**DEFAULTS))
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert attention(**DEFAULTS).key == attention(attn_scale=None).key


@pytest.mark.parametrize(
    "hint",
    [
        {"implementation": attention_implementation.UNIFIED},
        {"implementation": attention_implementation.COMPOSITE},
        {"compute_data_type": data_type.FLOAT},
        {"compute_data_type": data_type.HALF},
        {"compute_data_type": torch.bfloat16},
    ],
)
def test_hints_change_nothing(hint: dict[str, Any]):
    assert attention(**hint).key == attention().key


@pytest.mark.parametrize(
    "hint",
    [
        {"sm_count": 132},
        {"sm_version": 90},
        {"device_property": ropegraph.create_device_properties()},
        {"intermediate_data_type": data_type.FLOAT},
        {"intermediate_data_type": data_type.HALF},
        {"compute_data_type": data_type.HALF},
    ],
)
def test_hints_of_the_graph_change_nothing(hint: dict[str, Any]):
    assert attention(settings=hint).key == attention().key


@pytest.mark.parametrize("name", ["colour", "scale", "is_causal", "mask"])
def test_a_keyword_that_nobody_has(name: str):
    text = "is no argument here"
    g = new()
    t = {"q": g.tensor(X, name="q")}
    f = g.tensor((5, 1, 1, 8))
    refused(lambda: attention(**{name: 1}), f"sdpa 'attn': {name}=1 {text}")
    refused(lambda: backward(**{name: 1}), f"sdpa_backward 'attn': {name}=1 {text}")
    refused(lambda: g.rope(t["q"], f, name="r", **{name: 1}), f"rope 'r': {name}=1 {text}")
    refused(lambda: g.rope_backward(t["q"], f, **{name: 1}), f"{name}=1 {text}")
    refused(lambda: g.tensor(X, **{name: 1}), f"{name}=1 {text}")
    refused(lambda: ropegraph.pygraph(**{name: 1}), f"{name}=1 {text}")
    refused(lambda: rotation().execute({}, **{name: 1}), f"execute: {name}=1 {text}")
    if name != "scale":
        refused(lambda: g.scale(t["q"], 2.0, **{name: 1}), f"{name}=1 {text}")
        refused(lambda: g.mul(t["q"], 2.0, **{name: 1}), f"{name}=1 {text}")


# Two names of one thing


@pytest.mark.parametrize(
    ("old", "new_names"),
    [
        ({"use_causal_mask": True}, {"diagonal_band_right_bound": 0}),
        (
            {"use_causal_mask_bottom_right": True},
            {
                "diagonal_band_right_bound": 0,
                "diagonal_alignment": diagonal_alignment.BOTTOM_RIGHT,
            },
        ),
        ({"sliding_window_length": 3}, {"diagonal_band_left_bound": 3}),
        ({"is_inference": True}, {"generate_stats": False}),
        ({"is_inference": False}, {"generate_stats": True}),
        ({"use_causal_mask": True, "diagonal_band_right_bound": 0}, {"use_causal_mask": True}),
        ({"diagonal_alignment": "BOTTOM_RIGHT", "diagonal_band_left_bound": 3},
         {"diagonal_alignment": diagonal_alignment.BOTTOM_RIGHT, "sliding_window_length": 3}),
        ({"dropout": (0.0, 1, 2)}, {"dropout": None}),
        ({"softcap": None}, {"score_mod": None}),
        ({"attn_scale": 1}, {"attn_scale": None}),
        ({"attn_scale": np.float32(0.5)}, {"attn_scale": 0.5}),
    ],
)  # fmt: skip
def test_deprecated_and_short_names(old: dict[str, Any], new_names: dict[str, Any]):
    def key(options: dict[str, Any]) -> str:
        inference = "is_inference" in options
        return attention(**({"generate_stats": None} if inference else {}), **options).key

    assert key(old) == key(new_names)


@pytest.mark.parametrize(
    ("options", "has_stats"),
    [({}, True), ({"generate_stats": True}, True), ({"generate_stats": False}, False),
     ({"is_inference": True}, False), ({"is_inference": False}, True)],
)  # fmt: skip
def test_stats_are_none_where_they_are_not_wanted(options: dict[str, Any], has_stats: bool):
    g = new()
    q = g.tensor((1, 2, 3, 8))
    made = g.sdpa(q, q, q, **options)
    assert isinstance(made, list)
    assert len(made) == 2
    assert (made[1] is not None) is has_stats


@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        ("attn_mask", "bias or use_causal_mask"),
        ("is_causal", "use_causal_mask"),
        ("softmax_scale", "attn_scale"),
        ("dropout_p", "dropout"),
        ("alibi_slopes", "use_alibi_mask"),
    ],
)
def test_a_keyword_of_torch_or_flash_attn_is_told_its_name_here(keyword: str, meant: str):
    g = new()
    q = g.tensor((1, 2, 3, 8), name="q")
    refused(
        lambda: g.sdpa(q, q, q, **{keyword: 0.5}),
        f"{keyword}=0.5 is no argument here; did you mean {meant}?",
    )


def test_stats_that_nobody_asked_for_are_not_computed():
    g = new()
    q = g.tensor((1, 2, 3, 8), name="q")
    g.sdpa(q, q, q, name="attn")[0].set_output(True).set_name("o")
    assert "Stats" not in g.plan.graph.node("attn").outputs
    assert set(run(g)) == {"o"}


def test_scale_and_mul():
    for record in (
        lambda g, x: g.scale(x, 2.0),
        lambda g, x: g.scale(input=x, scale=2),
        lambda g, x: g.mul(x, 2.0),
        lambda g, x: g.mul(2, x),
        lambda g, x: g.mul(a=x, b=np.float32(2)),
        lambda g, x: g.scale(x, 2.0, data_type.FLOAT, "scale.0"),
        lambda g, x: g.scale(x, 2.0, compute_data_type=NOT_SET),
    ):
        g = new()
        record(g, g.tensor(X, name="x")).set_output(True).set_name("y")
        x = torch.randn(X)
        assert torch.equal(run(g, x=x)["y"], 2 * x)
    g = new()
    x = g.tensor(X, name="x")
    refused(lambda: g.mul(x, x), "one must be a tensor and one a host number")
    refused(lambda: g.mul(2.0, 3.0), "one must be a tensor and one a host number")
    refused(lambda: g.mul(x, torch.ones(1)), "one must be a tensor and one a host number")
    refused(lambda: g.mul(x, True), "scale=True is not a number")
    refused(lambda: g.scale(x, torch.tensor(2.0)), "scale is a tensor")
    refused(
        lambda: g.scale(x, 2.0, compute_data_type=torch.float64), "computed in fp32", "leave it"
    )


@pytest.mark.parametrize("place", ["graph", "node"])
def test_a_wider_compute_type_is_used(place: str):
    """fp64 arithmetic on fp32 data gives the correctly rounded result."""
    wide = {"compute_data_type": torch.float64}
    x, f = torch.randn(X, dtype=F32), 50 * torch.rand(5, 1, 1, 8)
    g = rotation(**({"settings": wide} if place == "graph" else wide))
    got = run(g, x=x, f=f)["y"]
    angles = f[..., :4].double().permute(1, 2, 0, 3)
    x1, x2 = x.double().chunk(2, dim=3)
    want = torch.cat(
        [x1 * angles.cos() - x2 * angles.sin(), x2 * angles.cos() + x1 * angles.sin()], dim=3
    )
    assert torch.equal(got, want.float())
    assert not torch.equal(run(rotation(), x=x, f=f)["y"], got)
    assert rotation(settings={"compute_data_type": "half"}).key == rotation().key
