"""Rotations of the torch executor on a GPU: as on a CPU, and wrong positions without a wait."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ropegraph
from ropegraph.testing.inputs import normal
from tests.engines.rotations import F32, POSITIONS, SOURCES, D, H, case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ENGINES = ("torch",)


def graph(attrs: Any, x: Tensor, tensors: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """One rotation on the GPU as recorded by a caller, and its buffers."""
    g = ropegraph.pygraph(io_data_type=x.dtype, engines=ENGINES)
    bound = {"x": x.cuda(), **{n: t.cuda() for n, t in tensors.items()}}
    t = {n: g.tensor_like(b, name=n) for n, b in bound.items()}
    options = {n: v for n, v in vars(attrs).items() if n not in ("angles", "compute")}
    if attrs.half_width:
        options.pop("table_layout")
    data = t.pop("x")
    g.rope(data, **t, **options, name="turn").set_output(True).set_name("y")
    bound["y"] = torch.full_like(bound["x"], torch.nan)
    return g, bound


@pytest.mark.parametrize("numerics", ["fp32", "hf", "nemo"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("source", SOURCES)
def test_as_on_a_cpu_without_a_wait(source, positions, numerics):
    if numerics != "fp32" and source not in ("cos_sin", "packed"):
        pytest.skip("promised bits need tables")
    c = case(source, "half", POSITIONS[positions], dtype=F32, numerics=numerics)
    b, s = c.dead.shape
    x = normal((b, H, s, D), F32, seed=1)
    g, bound = graph(c.attrs, x, c.tensors)
    g.execute(bound)
    # Once more, where any wait of the host for the device is an error.
    bound["y"].fill_(torch.nan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        g.execute(bound)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(bound["y"].cpu().double(), c.formula(x), rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32])
@pytest.mark.parametrize("numerics", ["hf", "nemo"])
def test_promised_bits_are_those_of_a_cpu(numerics, dtype):
    c = case("cos_sin", "half", POSITIONS["ids"], dtype=F32, numerics=numerics)
    x = normal((2, H, 6, D), dtype, seed=1)
    g, bound = graph(c.attrs, x, c.tensors)
    g.execute(bound)
    cpu = ropegraph.pygraph(io_data_type=dtype, engines=ENGINES)
    t = {n: cpu.tensor_like(b, name=n) for n, b in {"x": x, **c.tensors}.items()}
    options = {"rope_dim": 6, "rope_offset": 2, "half_width": True, "numerics": numerics}
    cpu.rope(t.pop("x"), **t, **options).set_output(True).set_name("y")
    y = torch.full_like(x, torch.nan)
    cpu.execute({"x": x, **c.tensors, "y": y})
    assert torch.equal(bound["y"].cpu(), y)


WRONG: dict[str, tuple[dict[str, Any], list[bool]]] = {
    "start": ({"start_positions": [3]}, [False, True, True, True]),
    "ids": ({"position_ids": [[-1, 0, 4, 3]]}, [True, False, True, False]),
    "packed": ({"cu_seqlens": [0, 4], "start_positions": [2]}, [False, False, True, True]),
    "decreasing": ({"cu_seqlens": [0, 3, 2]}, [True] * 4),
    "past the end": ({"cu_seqlens": [0, 2, 9]}, [True] * 4),
}


@pytest.mark.parametrize("how", WRONG)
def test_wrong_positions_give_rows_of_nan_that_verify_tells(how):
    tensors, wrong = WRONG[how]
    table = normal((4, 1, 1, 2), F32)
    x = normal((1, 2, 4, 6), F32)
    g = ropegraph.pygraph(io_data_type=F32, engines=ENGINES)
    bound = {"x": x, "freqs": table}
    bound |= {n: torch.tensor(v, dtype=torch.int32) for n, v in tensors.items()}
    bound = {n: t.cuda() for n, t in bound.items()}
    t = {n: g.tensor_like(b, name=n) for n, b in bound.items()}
    g.rope(t.pop("x"), **t, half_width=True, rope_dim=4, name="turn").set_output(True).set_name("y")
    bound["y"] = torch.zeros_like(bound["x"])
    g.build()
    torch.cuda.set_sync_debug_mode("error")
    try:
        g.execute(bound)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rows = bound["y"].isnan().all(3).all(1)[0].cpu().tolist()
    assert rows == wrong
    assert bool(bound["y"][:, :, [not w for w in wrong]].isfinite().all())
    report = g.verify(bound)
    assert not report.is_ok
    assert "position outside of the table" in report.faults[0]
