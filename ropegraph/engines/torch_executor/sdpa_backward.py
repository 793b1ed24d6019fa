"""What sdpa_backward means in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ropegraph.engines.torch_executor.band import band_of
from ropegraph.engines.torch_executor.blockwise_backward import Backward, backward
from ropegraph.engines.torch_executor.flash import fits, flash_backward, is_causal, takes_scale
from ropegraph.engines.torch_executor.logits import Logits
from ropegraph.engines.torch_executor.sdpa import compute_dtype, scale_reader, shape_of
from ropegraph.ir.ops import SdpaBackward
from ropegraph.lowering.engine import Executable, Step


def compile_sdpa_backward(step: Step) -> Executable:
    """The executable of an sdpa_backward step."""
    attrs = cast(SdpaBackward, step.node.attrs)
    shape = shape_of(step)
    compute = compute_dtype(step)
    scale = scale_reader(step)
    in_slots = tuple(step.slot(port) for port in ("q", "k", "v", "o", "dO", "stats"))
    out_slots = tuple(step.slot(port) for port in ("dQ", "dK", "dV"))
    band = band_of(attrs, shape.s_q, shape.s_kv)
    causal = is_causal(band)
    use_flash = fits(shape, step.value("q").dim[3], step.value("v").dim[3], band)

    def run(env: Sequence[Any], stream: int) -> None:
        q, k, v, o, d_o, stats = (env[slot] for slot in in_slots)
        d_q, d_k, d_v = (env[slot] if slot >= 0 else None for slot in out_slots)
        a = scale(env)
        if use_flash and causal is not None and takes_scale(a, causal, compute):
            if flash_backward(q, k, v, o, d_o, stats, (d_q, d_k, d_v), a, causal, compute):
                return
        logits = Logits(a, band)
        backward(Backward(shape, compute, logits, q, k, v, o, d_o, stats, d_q, d_k, d_v))

    return run
