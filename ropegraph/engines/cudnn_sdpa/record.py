"""A recipe as a graph of cuDNN Frontend: one node, every port a tensor with its uid."""

from __future__ import annotations

from typing import Any

from ropegraph.dtypes import DType
from ropegraph.engines.cudnn_sdpa.frontend import FeGraph, FeTensor, Frontend
from ropegraph.engines.cudnn_sdpa.operands import Operand
from ropegraph.engines.cudnn_sdpa.recipe import Recipe

# Output ports that FE returns, in its order; other outputs are handed to it as arguments.
FORWARD_OUTPUTS = ("O", "Stats")
BACKWARD_OUTPUTS = ("dQ", "dK", "dV")


def record(
    fe: Frontend, recipe: Recipe, handle: object = None, implementation: str = "AUTO"
) -> FeGraph:
    """The recorded graph, not yet validated.

    implementation: which of FE's forward nodes to use; AUTO is its unified one where that has
    every feature, else the composite one.
    """
    graph = fe.pygraph(
        name="sdpa_backward" if recipe.is_backward else "sdpa",
        io_data_type=fe_type(fe, recipe.io),
        intermediate_data_type=fe.data_type.FLOAT,
        compute_data_type=fe.data_type.FLOAT,
        handle=handle,
    )
    returned = BACKWARD_OUTPUTS if recipe.is_backward else FORWARD_OUTPUTS
    made: dict[str, FeTensor] = {}
    # Offsets come first, for the tensors that they belong to name them.
    for uid, operand, _ in sorted(recipe, key=lambda entry: bool(entry[1].ragged)):
        if operand.port not in returned:
            made[operand.port] = _tensor(fe, graph, uid, operand, made)
    arguments = sdpa_arguments(fe, recipe, made)
    if recipe.is_backward:
        arguments["use_deterministic_algorithm"] = recipe.deterministic
        outputs = graph.sdpa_backward(name="sdpa_backward", **arguments)
    else:
        arguments["generate_stats"] = any(o.port == "Stats" for o in recipe.operands)
        arguments["implementation"] = getattr(fe.attention_implementation, implementation)
        outputs = graph.sdpa(name="sdpa", **arguments)
    for uid, operand, _ in recipe:
        if operand.port in returned:
            tensor = outputs[returned.index(operand.port)]
            tensor.set_output(True).set_uid(uid).set_name(operand.port)
            tensor.set_dim(operand.dim).set_stride(operand.stride)
            tensor.set_data_type(fe_type(fe, operand.dtype))
            if operand.ragged:
                tensor.set_ragged_offset(made[operand.ragged])
                tensor.set_ragged_offset_multiplier(operand.multiplier)
    return graph


def fe_type(fe: Frontend, dtype: DType) -> Any:
    """FE's name for a data type, which is ours."""
    return getattr(fe.data_type, dtype.name)


def _tensor(
    fe: Frontend, graph: FeGraph, uid: int, operand: Operand, made: dict[str, FeTensor]
) -> FeTensor:
    tensor = graph.tensor(
        dim=operand.dim,
        stride=operand.stride,
        data_type=fe_type(fe, operand.dtype),
        is_pass_by_value=operand.is_host,
        ragged_offset=made[operand.ragged] if operand.ragged else None,
        ragged_offset_multiplier=operand.multiplier,
        name=operand.port,
        uid=uid,
    )
    return tensor.set_output(True) if operand.is_output else tensor


def sdpa_arguments(fe: Frontend, recipe: Recipe, made: dict[str, FeTensor]) -> dict[str, Any]:
    """The keywords that both directions share; FE's names are ours.  made: tensors by port."""
    alignment = "BOTTOM_RIGHT" if recipe.bottom_right else "TOP_LEFT"
    arguments: dict[str, Any] = {
        port: tensor
        for port, tensor in made.items()
        if port not in ("seed", "offset") and not port.startswith("ragged_offset_")
    }
    if recipe.attn_scale is not None:
        arguments["attn_scale"] = recipe.attn_scale
    arguments |= {
        "use_alibi_mask": recipe.alibi,
        "use_padding_mask": recipe.padding,
        "diagonal_alignment": getattr(fe.diagonal_alignment, alignment),
    }
    for name in ("left_bound", "right_bound"):
        bound = getattr(recipe, name)
        if bound is not None:
            arguments[f"diagonal_band_{name}"] = bound
    if recipe.dropout_p:
        arguments["dropout"] = (recipe.dropout_p, made["seed"], made["offset"])
    if recipe.max_seq_len_kv is not None:
        arguments["paged_attention_max_seq_len_kv"] = recipe.max_seq_len_kv
    return arguments
