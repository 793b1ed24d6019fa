"""Time cuda.rope on a GPU:  python -m tests.kernels.bench_rope OUT.json [COMMIT] [--sources].

Needs CuPy and Triton. Times are medians of triton.testing.do_bench, which clears the L2 before each
run: device time by CUDA events, one launch at a time. --sources leaves out what does not concern
sources of angles and positions. With --render it prints such a record as Markdown.
What `make bench` times (large bshd, in place, pairs, THD, context parallel, fused) is not here.
tests/gpu/test_cuda_rope.py checks what is timed here.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ropegraph.engines.cuda_rope.engine import CudaRope
from ropegraph.engines.cuda_rope.job import parts_of
from ropegraph.ir.ops import Rope, RopeBackward, RopePair
from ropegraph.lowering.engine import Device, Executable
from tests.kernels.cases import Case, Ragged, case

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def build(given: Case) -> Executable:
    major, minor = torch.cuda.get_device_capability()
    device = Device("cuda", torch.cuda.current_device(), 10 * major + minor)
    engine = CudaRope()
    assert engine.why_not(given.step, device) == (), engine.why_not(given.step, device)
    return engine.compile(given.step, device)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


# ---- times


def table(s: int, width: int) -> Tensor:
    half = torch.arange(width // 2, device="cuda", dtype=torch.float32)
    angle = torch.outer(
        torch.arange(s, device="cuda", dtype=torch.float32), 10000 ** (-2 * half / width)
    )
    return torch.cat([angle, angle], -1)[:, None, None]


def data(b: int, s: int, h: int, d: int, layout: str, dtype: torch.dtype = BF16) -> Tensor:
    if layout == "bhsd":
        return torch.randn(b, h, s, d, device="cuda", dtype=dtype)
    return torch.randn(b, s, h, d, device="cuda", dtype=dtype).transpose(1, 2)


def pair(q: Tensor, k: Tensor, op: Rope | RopeBackward) -> Case:
    read, written = ("dY", "dX") if isinstance(op, RopeBackward) else ("input", "output")
    width = op.rope_dim // 2 if op.half_width else op.rope_dim
    freqs = table(q.shape[2], op.rope_dim)[..., :width].contiguous()
    tensors: dict[str, Tensor] = {}
    for i, x in enumerate((q, k)):
        tensors |= {f"{read}{i}": x, f"freqs{i}": freqs, f"{written}{i}": torch.empty_like(x)}
    op = replace(op, output_scale=0.088)
    return case(RopePair((op, replace(op, output_scale=1.0))), **tensors)  # type: ignore[arg-type]


def moved_bytes(given: Case) -> int:
    """Bytes of data read and written, of the columns of the tables that are read, of positions."""
    total, tables = 0, set[int]()
    for port, value in given.step.values.items():
        tensor = given.env[given.step.slots[port]]
        if port.startswith(("input", "output", "dY", "dX")):
            total += tensor.numel() * value.dtype.itemsize
        elif not port.startswith("offsets") and tensor.data_ptr() not in tables:
            tables.add(tensor.data_ptr())
            part, _ = parts_of(given.step)[0]
            is_half = port.startswith("freqs") and part.table_layout != "full"
            columns = part.rope_dim // 2 if is_half else tensor.shape[-1]
            total += tensor.numel() // tensor.shape[-1] * columns * value.dtype.itemsize
    return total


@dataclass
class Row:
    """One line of the table."""

    work: str
    us: float
    tb_per_s: float
    target_us: float | None = None


def timed(fn: Callable[[], object], rep: int = 60) -> float:
    from triton.testing import do_bench

    return 1e3 * do_bench(fn, warmup=15, rep=rep, return_mode="median")


def measure(work: str, given: Case, target: float | None = None) -> Row:
    exe, env, handle = build(given), given.env, stream()
    us = timed(lambda: exe(env, handle))
    return Row(work, us, moved_bytes(given) / us / 1e6, target)


def copy_row(work: str, *tensors: Tensor) -> Row:
    targets = [torch.empty_like(t) for t in tensors]

    def copies() -> None:
        for source, target in zip(tensors, targets, strict=True):
            target.copy_(source)

    us = timed(copies)
    return Row(work, us, 2 * sum(t.numel() * t.element_size() for t in tensors) / us / 1e6)


def shapes() -> list[Row]:
    rows: list[Row] = []
    forward = Rope(128, 0)
    backward = RopeBackward(128, 0)
    sizes = [("bhsd", 2, 8192, 91.0), ("bhsd", 1, 131_072, 655.0), ("bhsd", 1, 2048, 17.0),
             ("bshd", 8, 512, None), ("bshd", 1, 256, None), ("bshd", 64, 1, None)]  # fmt: skip
    for layout, b, s, target in sizes:
        q, k = data(b, s, 32, 128, layout), data(b, s, 8, 128, layout)
        name = f"b{b} s{s} {layout}"
        rows.append(copy_row(f"copy Q, copy K; {name}", q, k))
        rows.append(measure(f"rope Q+K; {name}", pair(q, k, forward), target))
        rows.append(measure(f"rope backward dQ+dK; {name}", pair(q, k, backward), target))
        rows.append(copy_row(f"one copy of as many bytes; {name}", torch.cat([q, k], 1)))
        del q, k
    return rows


def kinds() -> list[Row]:
    """Other types, layouts and widths at b2 s8192, h 32/8 unless said otherwise."""
    rows: list[Row] = []
    b, s = 2, 8192
    packed = torch.randn(b, s, 48, 128, device="cuda", dtype=BF16).transpose(1, 2)
    q, k = packed[:, :32], packed[:, 32:40]
    rows.append(measure("from packed QKV", pair(q, k, Rope(128, 0)), 91))
    del packed
    q, k = data(b, s, 32, 128, "bshd"), data(b, s, 8, 128, "bshd")
    pairs = Rope(128, 0, interleaved=True, interleaved_output=True, half_width=True)
    plan: list[tuple[str, Rope | RopeBackward]] = [
        ("pairs in, halves out", replace(pairs, interleaved_output=False)),
        ("half-width table", Rope(128, 0, half_width=True)),
        ("full table", Rope(128, 0, table_layout="full")),
        ("full table, backward", RopeBackward(128, 0, table_layout="full")),
        ("64 of 128 channels", Rope(64, 0)),
    ]
    rows += [measure(what, pair(q, k, op)) for what, op in plan]
    for dtype, name in ((F16, "fp16"), (F32, "fp32")):
        rows.append(measure(name, pair(q.to(dtype), k.to(dtype), Rope(128, 0))))
    odd_q, odd_k = (torch.randn(t.numel() + 1, device="cuda", dtype=BF16)[1:].view(
        b, s, t.shape[1], 128).transpose(1, 2) for t in (q, k))  # fmt: skip
    rows.append(measure("base off 16 bytes (rope_any)", pair(odd_q, odd_k, Rope(128, 0))))
    del q, k, odd_q, odd_k
    for d in (64, 256):
        q, k = data(b, s, 32, d, "bshd"), data(b, s, 8, d, "bshd")
        rows.append(copy_row(f"copy Q, copy K; d{d}", q, k))
        rows.append(measure(f"d{d}", pair(q, k, Rope(d, 0))))
    q, k = data(1, 4096, 128, 192, "bshd"), data(1, 4096, 1, 64, "bshd")
    tail = case(
        RopePair((Rope(64, 128), Rope(64, 0))),
        input0=q, freqs0=(f := table(4096, 64)), output0=torch.empty_like(q),
        input1=k, freqs1=f, output1=torch.empty_like(k),
    )  # fmt: skip
    rows.append(copy_row("copy Q, copy K rope; MLA b1 s4096 h128 d192 r64", q, k))
    rows.append(measure("MLA b1 s4096 h128 d192, r64 at the tail, K rope of 1 head", tail))
    rows.append(ragged_row())
    return rows


def ragged_row() -> Row:
    lengths = [5000, 100, 3000, 1, 4096, 2000, 1500, 687]
    stops = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device="cuda")
    total = int(stops[-1])
    tensors: dict[str, Tensor | Ragged] = {}
    freqs = table(8192, 128)
    for i, h in enumerate((32, 8)):
        x = torch.randn(total, h, 128, device="cuda", dtype=BF16)
        offsets = (stops * h * 128).to(torch.int32)
        dim, stride = (8, h, 8192, 128), (8192 * h * 128, 128, h * 128, 1)
        tensors[f"input{i}"] = Ragged(x, dim, stride, offsets)
        tensors[f"freqs{i}"] = freqs
        tensors[f"output{i}"] = Ragged(torch.empty_like(x), dim, stride, offsets)
    op = RopePair((Rope(128, 0), Rope(128, 0)))
    return measure(f"ragged, 8 sequences, {total} tokens", case(op, **tensors))


def host_us(given: Case) -> float:
    """Host time of one launch on an idle queue."""
    exe, env, handle = build(given), given.env, stream()
    times: list[float] = []
    for _ in range(500):
        torch.cuda.synchronize()
        start = time.perf_counter()
        exe(env, handle)
        times.append(time.perf_counter() - start)
    return sorted(times)[250] * 1e6


# ---- record


def render(path: Path) -> str:
    record = json.loads(path.read_text())
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    text = f"""# cuda.rope on an H200

{record["device"]}, {record["date"]}, commit `{record["commit"]}`; {versions}.
Medians of `triton.testing.do_bench`, which clears the L2 before each run; bf16, d128, h 32/8, and
b2 s8192 in bshd where nothing else is said. TB/s counts the bytes read and written, and the columns
of the table once. Host time of one launch of Q and K on an idle queue: {record["host_us"]:.1f} us.

| work | us | target | TB/s |
|---|---|---|---|
"""
    for row in record["rows"]:
        target = f"{row['target_us']:g}" if row["target_us"] else ""
        text += f"| {row['work']} | {row['us']:.1f} | {target} | {row['tb_per_s']:.2f} |\n"
    return text


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "--render":
        print(render(Path(arguments[1])), end="")
        return
    import cupy
    import triton

    from tests.kernels.bench_sources import sources

    torch.manual_seed(0)
    rows = sources() if "--sources" in arguments else shapes() + kinds() + sources()
    small = pair(data(1, 256, 32, 128, "bshd"), data(1, 256, 8, 128, "bshd"), Rope(128, 0))
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": arguments[1] if len(arguments) > 1 else "unknown",
        "device": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__, "cupy": cupy.__version__, "triton": triton.__version__,
            "CUDA": torch.version.cuda,
            "driver": cupy.cuda.runtime.driverGetVersion(),
        },
        "host_us": host_us(small),
        "rows": [row.__dict__ for row in rows],
    }  # fmt: skip
    path = Path(arguments[0])
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(render(path), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
