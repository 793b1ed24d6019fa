"""rmsnorm: shapes and data types; and what one launch of norm and rotation stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ropegraph.dtypes import DType, short, wider
from ropegraph.errors import GraphError
from ropegraph.ir.graph import Node, Value, row_major
from ropegraph.ir.ops import (
    ANGLE_PORTS,
    POSITION_PORTS,
    NormRope,
    NormRopeBackward,
    Op,
    Rope,
    shared,
)
from ropegraph.ir.rotation_shapes import check_rotation

Dim = tuple[int, ...]


def is_over_heads(scale: Dim) -> bool:
    """True if all heads of a token are normalised together.  scale: its dims."""
    return scale[1] != 1


def infer_norm(where: str, dims: Mapping[str, Dim]) -> dict[str, Dim]:
    """Dims of Y and inv_variance.  Raises GraphError naming port, dims and what would fit."""
    x, scale = dims["input"], dims["scale"]
    if len(x) != 4:
        raise GraphError(f"{where}: input {list(x)} has {len(x)} dims; use [b, h, s, d]")
    b, h, s, d = x
    if scale not in ((1, 1, 1, d), (1, h, 1, d)):
        raise GraphError(
            f"{where}: scale is {list(scale)} for input {list(x)}; use {[1, 1, 1, d]} to normalise "
            f"each head by itself, or {[1, h, 1, d]} for all heads of a token together"
        )
    return {"Y": x, "inv_variance": (b, 1 if is_over_heads(scale) else h, s, 1)}


def infer_norm_backward(where: str, dims: Mapping[str, Dim]) -> dict[str, Dim]:
    """Dims of DX and Dscale.  Raises GraphError naming port, dims and what would fit."""
    wanted = infer_norm(where, dims)
    for port, other in (("grad", "Y"), ("inv_variance", "inv_variance")):
        if dims[port] != wanted[other]:
            raise GraphError(f"{where}: {port} is {list(dims[port])}; use {list(wanted[other])}")
    return {"DX": dims["input"], "Dscale": dims["scale"]}


def infer_norm_rope(
    where: str, attrs: NormRope | NormRopeBackward, dims: Mapping[str, Dim]
) -> dict[str, Dim]:
    """Dims of what a fused launch writes."""
    check_rotation(where, attrs.rope, "input", dims)
    if isinstance(attrs, NormRope):
        made = infer_norm(where, dims)
        return {"output": made["Y"], "inv_variance": made["inv_variance"]}
    made = infer_norm_backward(where, {**dims, "grad": dims["dY"]})
    return {"dX": made["DX"], "Dscale": made["Dscale"]}


def check_norm_dtypes(where: str, dtypes: Mapping[str, DType]) -> None:
    """Raise GraphError if the weight is of a third type beside data and fp32."""
    x, scale = dtypes["input"], dtypes["scale"]
    if scale not in (x, DType.FLOAT):
        raise GraphError(
            f"{where}: scale is {short(scale)} but input is {short(x)}; use "
            f"{short(x)}{'' if x is DType.FLOAT else ' or fp32'}"
        )
    wanted = wider(x, dtypes.get("grad", x))
    if dtypes.get("inv_variance", wanted) is not wanted:
        raise GraphError(
            f"{where}: inv_variance is {short(dtypes['inv_variance'])}; use {short(wanted)}, as "
            "rmsnorm writes it"
        )


def unfused(
    node: Node[NormRope] | Node[NormRopeBackward], values: Mapping[str, Value], between: DType
) -> tuple[tuple[Node[Op], ...], tuple[Value, ...]]:
    """The nodes that a fused one stands for, and the values between them, of type ``between``."""
    attrs, ins, outs = node.attrs, node.inputs, node.outputs
    norm, rope = attrs.names
    angles = {p: ins[p] for p in (*ANGLE_PORTS[attrs.rope.angles], *POSITION_PORTS) if p in ins}
    x = values[ins["input"]]
    mid = Value(f"{node.name}::between", x.dim, row_major(x.dim), between)
    statistics = {p: outs[p] for p in ("inv_variance", "Dscale") if p in outs}
    weight = {"scale": ins["scale"]}
    turn: Node[Op]
    if isinstance(attrs, NormRope):
        if attrs.norm_first:
            made = Node[Op](
                norm, attrs.norm, {"input": x.name, **weight}, {"Y": mid.name, **statistics}
            )
            turn = Node(rope, attrs.rope, {"input": mid.name, **angles}, {"output": outs["output"]})
            return (made, turn), (mid,)
        turn = Node(rope, attrs.rope, {"input": x.name, **angles}, {"output": mid.name})
        made = Node[Op](
            norm, attrs.norm, {"input": mid.name, **weight}, {"Y": outs["output"], **statistics}
        )
        return (turn, made), (mid,)
    weight["inv_variance"] = ins["inv_variance"]
    if attrs.norm_first:
        turn = Node(rope, attrs.rope, {"dY": ins["dY"], **angles}, {"dX": mid.name})
        dx = {"DX": outs["dX"]} if "dX" in outs else {}
        ports = {"grad": mid.name, "input": x.name, **weight}
        return (turn, Node(norm, attrs.norm, ports, dx | statistics)), (mid,)
    turned = replace(mid, name=f"{node.name}::turned")
    again = Rope(**shared(attrs.rope))
    turn = Node(f"{rope}::again", again, {"input": x.name, **angles}, {"output": turned.name})
    ports = {"grad": ins["dY"], "input": turned.name, **weight}
    made = Node[Op](norm, attrs.norm, ports, {"DX": mid.name, **statistics})
    if "dX" not in outs:
        return (turn, replace(made, outputs=statistics)), (turned,)
    back = Node[Op](rope, attrs.rope, {"dY": mid.name, **angles}, {"dX": outs["dX"]})
    return (turn, made, back), (turned, mid)
