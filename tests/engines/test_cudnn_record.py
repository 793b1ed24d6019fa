"""The graph that is recorded in cuDNN Frontend, read back through its inspect(); no libcudnn."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch

from ropegraph.dtypes import DType
from ropegraph.engines.cudnn_sdpa.recipe import Recipe, recipe_of
from ropegraph.engines.cudnn_sdpa.record import record
from ropegraph.ir.ops import Sdpa, SdpaBackward
from ropegraph.lowering.engine import Step
from tests.engines.cudnn_steps import H200, frontend, lengths, packed, ragged, scalar, step

FE = frontend()
CAUSAL = {"attn_scale": 0.125, "right_bound": 0}
OFFSETS = {"starts": packed("starts", (3, 1, 1, 1), DType.INT64)}


def recorded(made: Step) -> dict[str, Any]:
    """The one node of the graph, its tensors by port, and the recipe."""
    recipe = recipe_of(made, H200)
    graph: Any = record(FE, recipe)
    if not torch.cuda.is_available():
        graph.validate()  # by FE's own rules; with a GPU the backend's version has a say too
    (node,) = graph.inspect()["nodes"]
    ports = {**graph.nodes[0].inputs, **graph.nodes[0].outputs}
    return {"params": dict(node["params"]), "type": node["type"], "ports": ports, "recipe": recipe}


def uids(recipe: Recipe) -> dict[str, int]:
    return {operand.port: uid for uid, operand, _ in recipe}


@pytest.mark.parametrize("is_backward", [False, True])
def test_every_port_is_a_tensor_with_its_uid_dims_strides_and_type(is_backward: bool) -> None:
    op = SdpaBackward(**CAUSAL) if is_backward else Sdpa(**CAUSAL)
    made = step(op, h_q=12, h_k=2, h_v=4, d_qk=192, d_v=128)
    found = recorded(made)
    assert found["type"] == ("SDPA_BWD" if is_backward else "SDPA")
    assert set(found["ports"]) == {*made.node.inputs, *made.node.outputs}
    assert sorted(uids(found["recipe"]).values()) == list(range(1, len(found["ports"]) + 1))
    for port, tensor in found["ports"].items():
        value = made.value(port)
        assert tensor.get_uid() == uids(found["recipe"])[port]
        assert (tuple(tensor.get_dim()), tuple(tensor.get_stride())) == (value.dim, value.stride)
        assert tensor.get_data_type().name == value.dtype.name
        assert not tensor.get_is_virtual()
        assert tensor.ragged_offset is None


def test_the_slots_follow_the_uids() -> None:
    made = step(Sdpa(**CAUSAL))
    for _, operand, slot in recipe_of(made, H200):
        assert slot == made.slot(operand.port)


@pytest.mark.parametrize("op", [Sdpa, SdpaBackward])
@pytest.mark.parametrize("log2", [False, True])
def test_log2_is_a_factor_of_ln_2_in_both_directions(op: Any, log2: bool) -> None:
    found = recorded(step(op(attn_scale=0.3, softmax_input_is_log2=log2)))
    assert found["params"]["attn_scale"] == pytest.approx(0.3 * (log(2) if log2 else 1), rel=1e-15)


def test_a_scale_of_one_is_recorded_and_not_left_to_a_default() -> None:
    assert recorded(step(Sdpa()))["params"]["attn_scale"] == 1.0


@pytest.mark.parametrize("log2", [False, True])
def test_a_scale_tensor_is_passed_by_value_in_fp32(log2: bool) -> None:
    extra = {"attn_scale": scalar("attn_scale", DType.DOUBLE, is_host=True)}
    found = recorded(step(Sdpa(attn_scale=None, softmax_input_is_log2=log2), extra=extra))
    tensor = found["ports"]["attn_scale"]
    assert tensor.get_is_pass_by_value()
    assert tensor.get_data_type().name == "FLOAT"
    assert "attn_scale" not in found["params"]
    assert found["recipe"].scale_unit == pytest.approx(log(2) if log2 else 1)


BANDS = {
    "open": ({}, "TOP_LEFT", None, None),
    "causal": ({"right_bound": 0}, "TOP_LEFT", None, 0),
    "causal at the end": ({"right_bound": 0, "bottom_right": True}, "BOTTOM_RIGHT", None, 0),
    "window": ({"left_bound": 33}, "TOP_LEFT", 33, None),
    "both at the end": (
        {"left_bound": 33, "right_bound": 7, "bottom_right": True}, "BOTTOM_RIGHT", 33, 7
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", [Sdpa, SdpaBackward])
@pytest.mark.parametrize("name", BANDS)
def test_the_band_keeps_corner_and_bounds(op: Any, name: str) -> None:
    attrs, corner, left, right = BANDS[name]
    params = recorded(step(op(**attrs)))["params"]
    assert params["diagonal_alignment"].name == corner
    assert params.get("diagonal_band_left_bound") == left
    assert params.get("diagonal_band_right_bound") == right
    assert not any(old in params for old in ("use_causal_mask", "sliding_window_length"))


def test_bounds_past_every_key_fit_into_32_bits() -> None:
    params = recorded(step(Sdpa(left_bound=2**40, right_bound=2**33)))["params"]
    assert params["diagonal_band_left_bound"] == 464
    assert params["diagonal_band_right_bound"] == 464


@pytest.mark.parametrize("op", [Sdpa, SdpaBackward])
def test_flags_are_off_unless_asked_for(op: Any) -> None:
    params = recorded(step(op(**CAUSAL)))["params"]
    assert params["use_alibi_mask"] is False
    assert params["use_padding_mask"] is False
    assert "_dropout_n" not in params
    assert recorded(step(op(**CAUSAL, alibi=True)))["params"]["use_alibi_mask"] is True


def test_stats_are_generated_where_they_are_read_and_only_there() -> None:
    made = step(Sdpa(**CAUSAL))
    assert recorded(made)["params"]["generate_stats"] is True
    node = replace(made.node, outputs={"O": "O"})
    found = recorded(replace(made, node=node))
    assert found["params"]["generate_stats"] is False
    assert "Stats" not in found["ports"]


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_the_backward_is_deterministic_on_request(is_deterministic: bool) -> None:
    params = recorded(step(SdpaBackward(**CAUSAL, deterministic=is_deterministic)))["params"]
    assert params["use_deterministic_algorithm"] is is_deterministic


@pytest.mark.parametrize("op", [Sdpa, SdpaBackward])
@pytest.mark.parametrize("is_host", [False, True])
def test_dropout_is_a_probability_a_seed_and_an_offset(op: Any, is_host: bool) -> None:
    extra = {name: scalar(name, DType.INT64, is_host) for name in ("seed", "offset")}
    found = recorded(step(op(**CAUSAL, dropout_p=0.1), extra=extra))
    assert found["params"]["dropout_0"] == 0.1
    for i, name in ((1, "seed"), (2, "offset")):
        tensor = found["ports"][f"dropout_{i}"]
        assert tensor.get_uid() == uids(found["recipe"])[name]
        assert tensor.get_is_pass_by_value() is is_host
        assert tensor.get_data_type().name == "INT64"


def test_a_dropout_probability_of_zero_is_no_dropout() -> None:
    extra = {name: scalar(name, DType.INT64) for name in ("seed", "offset")}
    found = recorded(step(SdpaBackward(**CAUSAL, dropout_p=0.0), extra=extra))
    assert "_dropout_n" not in found["params"]
    assert not {"seed", "offset"} & set(uids(found["recipe"]))


def test_bias_sink_and_their_gradients() -> None:
    extra = {
        "bias": packed("bias", (1, 4, 200, 264)),
        "sink_token": packed("sink_token", (1, 4, 1, 1), DType.FLOAT),
    }
    assert {*extra} <= set(recorded(step(Sdpa(**CAUSAL), extra=extra))["ports"])
    made = step(SdpaBackward(**CAUSAL), extra=extra, outputs=("dBias", "dSink_token"))
    ports = recorded(made)["ports"]
    for gradient, source in (("dBias", "bias"), ("dSink_token", "sink_token")):
        assert ports[gradient].get_dim() == ports[source].get_dim()
        assert not ports[gradient].get_is_virtual()


@pytest.mark.parametrize("op", [Sdpa, SdpaBackward])
def test_padded_tensors_are_recorded_as_ragged_ones_a_batch_stride_apart(op: Any) -> None:
    made = step(op(**CAUSAL, padding=True), extra=lengths(2))
    found = recorded(made)
    assert found["params"]["use_padding_mask"] is True
    operands = {operand.port: operand for operand in found["recipe"].operands}
    for port, tensor in found["ports"].items():
        if port in ("seq_len_q", "seq_len_kv", "stats", "Stats"):
            assert tensor.ragged_offset is None
            continue
        offsets = operands[tensor.ragged_offset.get_name()]
        assert offsets.every == made.value(port).stride[0]
        assert offsets.dim == (3, 1, 1, 1)
        assert offsets.dtype is DType.INT32
    assert sum(operand.every is not None for operand in operands.values()) == 2


def test_offsets_of_a_padded_tensor_are_64_bit_where_they_must_be() -> None:
    wide = packed("q", (2, 4, 200, 64), stride=(2**30, 12800, 64, 1))
    recipe = recipe_of(step(Sdpa(padding=True), extra=lengths(2), values={"q": wide}), H200)
    found = {operand.every: operand.dtype for operand in recipe.operands if operand.every}
    assert found == {2**30: DType.INT64, 51200: DType.INT32, 33792: DType.INT32}


def test_ragged_tensors_keep_their_own_offsets() -> None:
    q, out = (ragged(2, 4, 200, 64, port, "starts") for port in ("q", "O"))
    values = {"q": q, "O": out, **OFFSETS}
    found = recorded(step(Sdpa(padding=True), extra=lengths(2), values=values))
    ports = found["ports"]
    assert ports["q"].ragged_offset is ports["O"].ragged_offset
    assert ports["q"].ragged_offset.get_data_type().name == "INT64"
    name = ports["q"].ragged_offset.get_name()
    slots = {operand.port: slot for _, operand, slot in found["recipe"]}
    assert slots[name] == list(step(Sdpa(), extra=lengths(2), values=values).slots).index("starts")


def test_packed_strides_reach_the_graph_in_both_directions() -> None:
    # q, k and v side by side in each token, and their gradients likewise.
    row = 8 * 64
    values = {
        name: packed(name, (2, h, 200, 64), stride=(200 * row, 64, row, 1))
        for name, h in (("q", 4), ("k", 2), ("v", 2), ("dQ", 4), ("dK", 2), ("dV", 2))
    }
    ports = recorded(step(SdpaBackward(**CAUSAL), s_kv=200, values=values))["ports"]
    for name in values:
        assert ports[name].get_stride() == [200 * row, 64, row, 1]


def test_a_stride_of_an_axis_of_length_one_is_made_to_fit() -> None:
    odd = packed("q", (1, 4, 1, 64), stride=(7, 64, 3, 1))
    tensor = recorded(step(Sdpa(), b=1, s_q=1, values={"q": odd}))["ports"]["q"]
    assert tensor.get_stride() == [256, 64, 64, 1]


def test_paged_keys_are_pools_with_tables_and_a_logical_length() -> None:
    tables = {
        f"paged_attention_{x}_table": packed("t" + x, (2, 1, 5, 1), DType.INT32) for x in "kv"
    }
    made = step(
        Sdpa(padding=True, max_seq_len_kv=320),
        s_q=1,
        s_kv=64,
        extra={**lengths(2), **tables},
        values={x: packed(x, (10, 2, 64, 64)) for x in "kv"},
    )
    found = recorded(made)
    assert found["params"]["paged_attention_max_seq_len_kv"] == 320
    assert {*tables} <= set(found["ports"])
    assert found["ports"]["k"].ragged_offset is None
    assert found["ports"]["q"].ragged_offset is not None


def test_an_output_nobody_reads_is_recorded_and_lands_in_the_workspace() -> None:
    made = step(SdpaBackward(**CAUSAL))
    found = recorded(replace(made, node=replace(made.node, outputs={"dK": "dK"})))
    assert {"dQ", "dK", "dV"} <= set(found["ports"])
    spare = {o.port: (o.spare_bytes, slot) for _, o, slot in found["recipe"] if o.spare_bytes}
    assert spare == {"dQ": (2 * 2 * 4 * 200 * 64, -1), "dV": (2 * 2 * 2 * 264 * 64, -1)}


@pytest.mark.parametrize("name", ["AUTO", "COMPOSITE"])
def test_the_implementation_is_named(name: str) -> None:
    graph = record(FE, recipe_of(step(Sdpa()), H200), implementation=name)
    assert graph.inspect()["nodes"][0]["params"]["implementation"].name == name


def test_equal_recipes_are_one_key_whatever_the_slots() -> None:
    one = recipe_of(step(Sdpa(**CAUSAL)), H200)
    other = replace(one, slots=tuple(slot + 5 for slot in one.slots))
    assert one == other
    assert hash(one) == hash(other)


DIFFERENT = {
    "scale": step(Sdpa(attn_scale=0.25, right_bound=0)),
    "bound": step(Sdpa(attn_scale=0.125, right_bound=1)),
    "corner": step(Sdpa(**CAUSAL, bottom_right=True)),
    "alibi": step(Sdpa(**CAUSAL, alibi=True)),
    "shape": step(Sdpa(**CAUSAL), s_q=201),
    "type": step(Sdpa(**CAUSAL), dtype=DType.HALF),
    "stride": step(
        Sdpa(**CAUSAL), values={"k": packed("k", (2, 2, 264, 64), stride=(33792, 64, 128, 1))}
    ),
    "padding": step(Sdpa(**CAUSAL, padding=True), extra=lengths(2)),
    "direction": step(SdpaBackward(**CAUSAL)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_whatever_is_recorded_is_in_the_key(what: str) -> None:
    assert recipe_of(DIFFERENT[what], H200) != recipe_of(step(Sdpa(**CAUSAL)), H200)


def test_so_are_the_device_and_its_cudnn() -> None:
    made = step(Sdpa())
    for other in (replace(H200, index=1), replace(H200, cudnn=91900)):
        assert recipe_of(made, other) != recipe_of(made, H200)
