"""Long sequences in torch: the s_q x s_kv matrix (4 GiB here) is never in memory."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from ropegraph.engines.torch_executor.sdpa import compile_sdpa
from ropegraph.engines.torch_executor.sdpa_backward import compile_sdpa_backward
from ropegraph.ir.graph import Node, Value
from ropegraph.ir.ops import Sdpa, SdpaBackward
from ropegraph.dtypes import as_dtype
from ropegraph.lowering.engine import Step

def call(compile_step, attrs, inputs, outputs):
    bound = {**inputs, **outputs}
    values = {n: Value(n, tuple(x.shape), x.stride(), as_dtype(x.dtype)) for n, x in bound.items()}
    slots = {n: i for i, n in enumerate(bound)}
    node = Node("a", attrs, {n: n for n in inputs}, {n: n for n in outputs})
    compile_step(Step(node, values, "torch", slots))(list(bound.values()), 0)

s, h, d = 16384, 4, 64
attrs = eval(sys.argv[1])
with torch.no_grad():
    q, k, v, d_o = (torch.randn(1, h, s, d) for _ in range(4))
    o, stats = torch.empty_like(q), torch.empty(1, h, s, 1)
    call(compile_sdpa, Sdpa(**attrs), dict(q=q, k=k, v=v), dict(O=o, Stats=stats))
    grads = {n: torch.empty_like(q) for n in ("dQ", "dK", "dV")}
    given = dict(q=q, k=k, v=v, o=o, dO=d_o, stats=stats)
    call(compile_sdpa_backward, SdpaBackward(**attrs), given, grads)
assert all(bool(x.isfinite().all()) for x in (o, stats, *grads.values()))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "attrs",
    ["dict(attn_scale=0.2, right_bound=0)", "dict(attn_scale=0.2, left_bound=2000, right_bound=9)"],
    ids=["flash", "blocks"],
)
def test_sixteen_thousand_rows_under_two_gib(attrs: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, attrs], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 2 * 2**30
