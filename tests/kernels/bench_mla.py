"""Time mla_kv_rope on a GPU beside a copy of as many bytes:  python -m tests.kernels.bench_mla.

Needs CuPy and Triton. Medians of triton.testing.do_bench, which clears the L2 before each run. The
copy moves half of the bytes that the kernel must read and write, there and back: what cudaMemcpy
makes of the same traffic. tests/gpu/test_mla.py checks what is timed here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ropegraph.ir.ops import MlaKvRope, MlaKvRopeBackward
from tests.kernels.bench_rope import build, stream, timed
from tests.kernels.cases import Case
from tests.kernels.mla_cases import case

BF16 = torch.bfloat16
BYTES = torch.uint8


def empty(b: int, h: int, s: int, d: int, layout: str, dtype: torch.dtype = BF16) -> Tensor:
    if layout == "bhsd":
        return torch.empty(b, h, s, d, device="cuda", dtype=dtype)
    if layout == "bshd":
        return torch.empty(b, s, h, d, device="cuda", dtype=dtype).transpose(1, 2)
    return torch.empty(s, b, h, d, device="cuda", dtype=dtype).permute(1, 2, 0, 3)


def inputs(b: int, h: int, s: int, layout: str, table: torch.dtype) -> dict[str, Tensor]:
    angle = torch.randn(s, 1, 1, 64, device="cuda")
    return {
        "kv": empty(b, h, s, 256, layout).normal_(),
        "k_rope": empty(b, 1, s, 64, layout).normal_(),
        "cos": angle.cos().to(table),
        "sin": angle.sin().to(table),
    }


def forward(b: int, h: int, s: int, layout: str, table: torch.dtype) -> Case:
    written = {"key": empty(b, h, s, 192, layout), "value": empty(b, h, s, 128, layout)}
    return case(MlaKvRope(128), inputs(b, h, s, layout, table), written)


def mxfp8(b: int, h: int, s: int, layout: str, table: torch.dtype) -> Case:
    written: dict[str, Tensor] = {}
    for side, d in (("key", 192), ("value", 128)):
        written |= {
            f"{side}_row": empty(b, h, s, d, layout, BYTES),
            f"{side}_row_scale": empty(b, h, s, d // 32, layout, BYTES),
            f"{side}_column": empty(b, h, s, d, layout, BYTES),
            f"{side}_column_scale": empty(b, h, s // 32, d, layout, BYTES),
        }
    return case(MlaKvRope(128, "mxfp8"), inputs(b, h, s, layout, table), written)


def backward(b: int, h: int, s: int, layout: str, table: torch.dtype) -> Case:
    given = {
        "dKey": empty(b, h, s, 192, layout).normal_(),
        "dValue": empty(b, h, s, 128, layout).normal_(),
    }
    given |= {p: t for p, t in inputs(b, h, s, layout, table).items() if p in ("cos", "sin")}
    written = {"dKV": empty(b, h, s, 256, layout), "dK_rope": empty(b, 1, s, 64, layout)}
    return case(MlaKvRopeBackward(128, 128), given, written)


def main() -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    print(f"{'work':<44} {'MB':>7} {'us':>8} {'TB/s':>6} {'copy us':>8} {'of copy':>8}")
    sizes = [(1, 128, 4096), (2, 128, 4096), (4, 16, 8192), (1, 128, 1024)]
    for b, h, s in sizes:
        for layout in ("sbhd", "bshd", "bhsd"):
            for make in (forward, mxfp8, backward):
                for table in (torch.float32, BF16) if layout == "sbhd" else (torch.float32,):
                    given = make(b, h, s, layout, table)
                    size = sum(t.numel() * t.element_size() for t in given.env)
                    exe, handle = build(given), stream()
                    us = timed(lambda exe=exe, env=given.env, handle=handle: exe(env, handle))
                    source = torch.empty(size // 2, device="cuda", dtype=BYTES)
                    target = torch.empty_like(source)
                    copy = timed(lambda a=target, x=source: a.copy_(x))
                    name = f"{make.__name__} b{b} h{h} s{s} {layout} {str(table)[6:]} tables"
                    print(
                        f"{name:<44} {size / 1e6:7.0f} {us:8.1f} {size / us / 1e6:6.2f} "
                        f"{copy:8.1f} {us / copy:8.3f}"
                    )
                    del given, exe, source, target


if __name__ == "__main__":
    main()
