"""A whole graph of rotations and one attention, as one graph of cuDNN Frontend."""

from __future__ import annotations

from ropegraph.engines.cudnn_sdpa.frontend import FeGraph, FeTensor, Frontend
from ropegraph.engines.cudnn_sdpa.operands import tidy
from ropegraph.engines.cudnn_sdpa.recipe import recipe_of
from ropegraph.engines.cudnn_sdpa.record import fe_type, sdpa_arguments
from ropegraph.ir.graph import Graph, Node, Value
from ropegraph.ir.ops import Attention, Op, Rope, RopeBackward, Sdpa
from ropegraph.lowering.choose import slots_of
from ropegraph.lowering.engine import Device, Step


def uids_of(graph: Graph) -> dict[str, int]:
    """Value name -> the uid under which it is recorded and bound."""
    return {name: uid for uid, name in enumerate(graph.values, 1)}


def record(fe: Frontend, graph: Graph, device: Device, handle: object = None) -> FeGraph:
    """The recorded graph, not yet validated.  Every value a node writes is a bound output: FE's
    rope nodes write to buffers of the caller even where only the attention reads them.
    """
    first = graph.values[graph.nodes[0].inputs[next(iter(graph.nodes[0].inputs))]]
    made = fe.pygraph(
        name=graph.name,
        io_data_type=fe_type(fe, first.dtype),
        intermediate_data_type=fe.data_type.FLOAT,
        compute_data_type=fe.data_type.FLOAT,
        handle=handle,
    )
    uids = uids_of(graph)
    tensors: dict[str, FeTensor] = {}
    for name in graph.inputs:
        value = graph.values[name]
        tensors[name] = made.tensor(
            dim=value.dim,
            stride=tidy(value.dim, value.stride),
            data_type=fe_type(fe, value.dtype),
            is_pass_by_value=value.is_host,
            name=name,
            uid=uids[name],
        )
    for node in graph.singles:
        for port, tensor in _add(fe, made, graph, node, tensors, device).items():
            name = node.outputs.get(port)
            if name is not None:
                tensors[name] = _output(fe, tensor, graph.values[name], uids[name])
    return made


def _output(fe: Frontend, tensor: FeTensor, value: Value, uid: int) -> FeTensor:
    tensor.set_output(True).set_uid(uid).set_name(value.name)
    tensor.set_dim(value.dim).set_stride(tidy(value.dim, value.stride))
    return tensor.set_data_type(fe_type(fe, value.dtype))


def _add(
    fe: Frontend,
    made: FeGraph,
    graph: Graph,
    node: Node[Op],
    tensors: dict[str, FeTensor],
    device: Device,
) -> dict[str, FeTensor]:
    """Record one node; its outputs by port."""
    inputs = {port: tensors[name] for port, name in node.inputs.items()}
    match node.attrs:
        case Rope() as attrs:
            scales = {"output_scale": attrs.output_scale, "rope_dim": attrs.rope_dim}
            return {"output": made.rope(name=node.name, **inputs, **scales)}
        case RopeBackward() as attrs:
            scales = {"output_scale": attrs.output_scale, "rope_dim": attrs.rope_dim}
            return {"dX": made.rope_backward(name=node.name, **inputs, **scales)}
        case Attention() as attrs:
            recipe = recipe_of(Step(node, graph.values, "", slots_of(graph)), device)
            arguments = sdpa_arguments(fe, recipe, inputs)
            if isinstance(attrs, Sdpa):
                stats = "Stats" in node.outputs
                outputs = made.sdpa(name=node.name, generate_stats=stats, **arguments)
                return {"O": outputs[0], **({"Stats": outputs[1]} if stats else {})}
            arguments["use_deterministic_algorithm"] = recipe.deterministic
            outputs = made.sdpa_backward(name=node.name, **arguments)
            return dict(zip(("dQ", "dK", "dV"), outputs, strict=True))
        case _:
            raise AssertionError(f"rules.why_not lets no {node.attrs} through")
