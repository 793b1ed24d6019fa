"""Time norm and rotation on a GPU:  python -m tests.kernels.bench_norm_rope [OUT.json].

Needs CuPy and Triton. Medians of triton.testing.do_bench, which clears the L2 before each run.
Beside each launch stand rope alone on the same tensors and one copy of as many bytes, at sizes and
types that `make bench` does not time. With --tune it tries other warps an SM, units a warp and
numbers of backward warps, at a size that `make bench` times.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ropegraph.engines.cuda_rope import norm_shape, norm_variant
from ropegraph.engines.cuda_rope.compiler import load
from ropegraph.engines.cuda_rope.engine import CudaRope
from ropegraph.ir.ops import (
    NormRope,
    NormRopeBackward,
    RmsNorm,
    RmsNormBackward,
    Rope,
    RopeBackward,
    RopePair,
)
from ropegraph.lowering.engine import Device
from tests.kernels.cases import Case
from tests.kernels.cases import case as rope_case
from tests.kernels.norm_cases import case, pair


@dataclass
class Row:
    """One line of the table.  us: a median.  tb_s: bytes that must move, over it."""

    work: str
    us: float
    beside_rope: float
    tb_s: float


@dataclass(frozen=True)
class Size:
    """[b, h, s, d] of Q, and the heads of K."""

    b: int = 2
    h: int = 32
    h_kv: int = 8
    s: int = 8192
    d: int = 128
    layout: str = "bshd"
    r: int = 0
    dtype: torch.dtype = torch.bfloat16

    def tensor(self, h: int) -> Tensor:
        if self.layout == "bshd":
            x = torch.randn(self.b, self.s, h, self.d, device="cuda", dtype=self.dtype)
            return x.transpose(1, 2)
        return torch.randn(self.b, h, self.s, self.d, device="cuda", dtype=self.dtype)

    def __str__(self) -> str:
        heads = f"h {self.h}/{self.h_kv}"
        part = f" r{self.r}" if self.r else ""
        return f"b{self.b} s{self.s} {heads} d{self.d}{part} {self.layout} {self.dtype}"[:60]


def bench(given: Case) -> float:
    from triton.testing import do_bench  # type: ignore[import-not-found]

    major, minor = torch.cuda.get_device_capability()
    exe: Any = CudaRope().compile(given.step, Device("cuda", 0, 10 * major + minor))
    scratch = torch.empty(getattr(exe, "workspace_bytes", 0), dtype=torch.uint8, device="cuda")
    env, stream = [*given.env, scratch], torch.cuda.current_stream().cuda_stream
    return 1e3 * do_bench(lambda: exe(env, stream), warmup=50, rep=300, return_mode="median")


def copy_us(count: int) -> float:
    from triton.testing import do_bench  # type: ignore[import-not-found]

    x = torch.empty(count // 2, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    return 1e3 * do_bench(lambda: y.copy_(x), warmup=50, rep=300, return_mode="median")


def table(size: Size) -> Tensor:
    return torch.randn(size.s, 1, 1, size.r or size.d, device="cuda")


def rope_pair(size: Size, backward: bool) -> Case:
    """Rope alone, Q and K in one launch."""
    kind = RopeBackward if backward else Rope
    op = kind(size.r or size.d, 0)
    freqs, ports = table(size), ("dY", "dX") if backward else ("input", "output")
    tensors: dict[str, Tensor] = {}
    for i, h in enumerate((size.h, size.h_kv)):
        x = size.tensor(h)
        tensors |= {f"{ports[0]}{i}": x, f"freqs{i}": freqs, f"{ports[1]}{i}": torch.empty_like(x)}
    return rope_case(RopePair((op, op)), **tensors)


def fused(
    size: Size, backward: bool, norm_first: bool = True, whole: bool = False, kept: bool = True
) -> Case:
    """Norm and rope, Q and K in one launch; in the backward with the gradient of the weight.

    kept: with inv_variance, as for training.
    """
    freqs, r = table(size), size.r or size.d
    parts: list[Case] = []
    for h in (size.h, size.h_kv):
        x = size.tensor(h)
        w = torch.randn(1, h if whole else 1, 1, size.d, device="cuda", dtype=size.dtype)
        inverse = torch.rand(size.b, 1 if whole else h, size.s, 1, device="cuda") + 0.5
        ins = {"input": x, "scale": w, "freqs": freqs}
        if not backward:
            op: Any = NormRope(RmsNorm(), Rope(r, 0), norm_first, ("n", "r"))
            outs = {"output": torch.empty_like(x)}
            outs |= {"inv_variance": inverse} if kept else {}
        else:
            op = NormRopeBackward(RmsNormBackward(), RopeBackward(r, 0), norm_first, ("n", "r"))
            ins |= {"dY": size.tensor(h), "inv_variance": inverse}
            outs = {"dX": torch.empty_like(x), "Dscale": torch.empty_like(w)}
        parts.append(case(op, ins, outs))
    return pair(*parts)


def moved(given: Case) -> int:
    """Bytes of every tensor once; of both jobs' table once."""
    tables = sum(t.nbytes for n, t in zip(given.step.slots, given.env, strict=True) if "freqs" in n)
    return sum(t.nbytes for t in given.env) - tables // 2


def rows(size: Size) -> Iterator[Row]:
    """Every form at one size."""
    for backward in (False, True):
        word = " backward" if backward else ""
        rope = rope_pair(size, backward)
        alone, count = bench(rope), moved(rope)
        yield Row(f"rope{word}; {size}", alone, 1.0, count / alone / 1e6)
        if not backward:
            given = fused(size, backward, kept=False)
            us, count = bench(given), moved(given)
            yield Row(f"norm, rope; no inv_variance; {size}", us, us / alone, count / us / 1e6)
        for norm_first, whole in ((True, False), (False, False), (True, True)):
            given = fused(size, backward, norm_first, whole)
            us, count = bench(given), moved(given)
            what = f"{'norm, rope' if norm_first else 'rope, norm'}{' of all heads' * whole}{word}"
            yield Row(f"{what}; {size}", us, us / alone, count / us / 1e6)
        us = copy_us(count)
        yield Row(f"one copy of the last one's bytes; {size}", us, us / alone, count / us / 1e6)


@contextmanager
def changed(**names: Any) -> Iterator[None]:
    """Constants of the launch, and ``resident``, at other values."""
    # What is compiled into a kernel and no field of its variant is no part of what it is kept by.
    load.cache_clear()
    owners = {"FLIGHT": norm_variant, "resident": norm_variant.NormVariant}
    try:
        with ExitStack() as stack:
            for name, value in names.items():
                given = property(lambda _, n=value: n) if name == "resident" else value
                stack.enter_context(patch.object(owners.get(name, norm_shape), name, given))
            yield
    finally:
        load.cache_clear()


FORWARD_TRIALS: tuple[dict[str, Any], ...] = (
    {}, {"resident": 20}, {"resident": 24}, {"UNITS": 1}, {"UNITS": 4}, {"FLIGHT": 1},
    {"FLIGHT": 1, "resident": 20}, {"FLIGHT": 4, "UNITS": 4, "resident": 12}, {"MANY_WARPS": 10**9},
)  # fmt: skip
BACKWARD_TRIALS: tuple[dict[str, Any], ...] = (
    {}, {"resident": 16}, {"resident": 20}, {"resident": 8}, {"BACKWARD_UNITS": 2},
    {"BACKWARD_UNITS": 8}, {"TOTAL_WARPS": 2048}, {"TOTAL_WARPS": 4096}, {"TOTAL_WARPS": 16384},
    {"resident": 16, "TOTAL_WARPS": 16384}, {"resident": 16, "BACKWARD_UNITS": 2},
)  # fmt: skip


def tune(size: Size) -> Iterator[Row]:
    """The same launches with other constants."""
    for backward, trials in ((False, FORWARD_TRIALS), (True, BACKWARD_TRIALS)):
        given, alone = fused(size, backward), bench(rope_pair(size, backward))
        for names in trials:
            with changed(**names):
                us = bench(given)
            word = "backward" if backward else "forward"
            yield Row(f"{word} {names or 'as it is'}", us, us / alone, moved(given) / us / 1e6)


SIZES = (
    Size(layout="bhsd"), Size(b=1, s=2048), Size(b=64, s=1), Size(d=64), Size(d=256),
    Size(dtype=torch.float16), Size(dtype=torch.float32), Size(r=64), Size(h=40, h_kv=8),
)  # fmt: skip


def main() -> None:
    found: list[Row] = []
    wanted = (tune(Size()),) if "--tune" in sys.argv else map(rows, SIZES)
    device = torch.cuda.get_device_name()
    print(f"| work on {device} | us | beside rope | TB/s |", "|---|---|---|---|", sep="\n")
    for each in wanted:
        for row in each:
            figures = f"{row.us:.1f} | {row.beside_rope:.2f} | {row.tb_s:.2f}"
            print(f"| {row.work} | {figures} |", flush=True)
            found.append(row)
    files = [a for a in sys.argv[1:] if not a.startswith("--")]
    if files:
        Path(files[0]).write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
