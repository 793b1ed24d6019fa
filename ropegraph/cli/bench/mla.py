"""mla_kv_rope, its backward and its MXFP8 form beside a copy, in each order of memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import ropegraph as rg
from ropegraph.cli.bench.row import Row
from ropegraph.cli.bench.work import Handles, Work, beside_copy
from ropegraph.cli.bench.workload import heads, strides

NOPE, V, R = 128, 128, 64
ORDERS = ("sbhd", "bshd", "bhsd")
Size = tuple[int, int, int]  # b, h, s


def _tables(s: int, device: str) -> dict[str, Tensor]:
    angle = torch.randn(s, 1, 1, R // 2, device=device).repeat(1, 1, 1, 2)
    return {"cos": angle.cos(), "sin": angle.sin()}


def _inputs(size: Size, order: str, device: str) -> dict[str, Tensor]:
    b, h, s = size
    return {
        "kv": heads((b, h, s, NOPE + V), order, device),
        "k_rope": heads((b, 1, s, R), order, device),
        **_tables(s, device),
    }


def _recorded(g: rg.pygraph, t: Handles, quantize: str | None = None) -> list[Any]:
    return g.mla_kv_rope(t["kv"], t["k_rope"], t["cos"], t["sin"], quantize, nope_dim=NOPE)


def forward(size: Size, order: str, device: str = "cuda") -> Work:
    """Key and value of every head."""

    def record(g: rg.pygraph, t: Handles) -> None:
        for n, x in zip(("key", "value"), _recorded(g, t), strict=True):
            x.set_output(True).set_name(n)

    return Work("mla_kv_rope", _inputs(size, order, device), record)


def mxfp8(size: Size, order: str, device: str = "cuda") -> Work:
    """Data and scales of both, by rows and by columns, in the same order of memory."""

    def record(g: rg.pygraph, t: Handles) -> None:
        made = _recorded(g, t, "mxfp8")
        for n, quantized in zip(("key", "value"), made, strict=True):
            for form, x in quantized._asdict().items():
                x.set_output(True).set_name(f"{n}_{form}").set_data_type(torch.uint8)
                x.set_stride(strides(x.get_dim(), order))

    return Work("mla_kv_rope, mxfp8", _inputs(size, order, device), record)


def backward(size: Size, order: str, device: str = "cuda") -> Work:
    """The gradients of kv and of the channels that all heads share."""
    b, h, s = size
    given = {
        "dKey": heads((b, h, s, NOPE + R), order, device),
        "dValue": heads((b, h, s, V), order, device),
        **_tables(s, device),
    }

    def record(g: rg.pygraph, t: Handles) -> None:
        made = g.mla_kv_rope_backward(t["dKey"], t["dValue"], t["cos"], t["sin"])
        for n, x in zip(("dKV", "dK_rope"), made, strict=True):
            x.set_output(True).set_name(n)

    return Work("mla_kv_rope_backward", given, record)


FORMS = {
    "mla_kv_rope": forward,
    "mla_kv_rope to MXFP8": mxfp8,
    "mla_kv_rope_backward": backward,
}


def rows(
    size: Size = (4, 16, 8192), wide: Size = (2, 128, 4096), device: str = "cuda"
) -> list[Row]:  # fmt: skip
    """Every form in every order; with many heads in TransformerEngine's order alone."""
    return [
        beside_copy(f"{what}, b{b} h{h} s{s} {order}", build((b, h, s), order, device))
        for (b, h, s), orders in ((size, ORDERS), (wide, ORDERS[:1]))
        for order in orders
        for what, build in FORMS.items()
    ]
