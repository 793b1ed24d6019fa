"""What a derived gradient graph is given besides: buffers, and the wish for the same bits."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from ropegraph.api.plans import Form
from ropegraph.api.pygraph import pygraph
from ropegraph.functional.kind import has_norms
from ropegraph.ir.ops import SdpaBackward


def can_turn_in_place(forms: Container[str], attributes: dict[str, Any]) -> bool:
    """True if one buffer serves: no norm beside the rotation, no pairs written in another order."""
    moves_channels = attributes["interleaved_output"] not in (None, attributes["interleaved"])
    return not (moves_channels or has_norms(forms) or "cu_seqlens" in forms)


def unturned(graph: pygraph, names: list[str], forms: Mapping[str, Form]) -> dict[str, str]:
    """Give gradients that are still to be turned back a buffer: name -> slot.

    names: what has a gradient.  forms: of those buffers, for the slots that may have one.
    In the workspace they would stay for good, and of packed sequences take more than these do. A
    kernel turns them where they are; on a CPU torch would copy them first, so there they stay.
    """
    found: dict[str, str] = {}
    for node in graph.recorder.nodes:
        for slot, port in (("q", "dQ"), ("k", "dK")):
            grad = node.outputs.get(port)
            if not isinstance(node.attrs, SdpaBackward) or grad is None or slot not in forms:
                continue
            # of a packed sequence the workspace would hold as many rows as if all were the longest
            is_ragged = grad.get_ragged_offset() is not None
            if is_ragged or ("freqs" not in names and graph.settings["handle"] is None):
                stride = forms[slot].stride
                if is_ragged:
                    stride = graph.find_tensor(f"d{slot}").get_stride()
                grad.set_saved(True).set_name(f"d{slot}_rot").set_stride(stride)
                found[f"d{slot}_rot"] = slot
    return found


def make_deterministic(graph: pygraph) -> None:
    """Ask for a backward that gives the same bits at every run."""
    for node in graph.recorder.nodes:
        if isinstance(node.attrs, SdpaBackward):
            node.attrs = replace(node.attrs, deterministic=True)
