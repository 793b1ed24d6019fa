"""Compile mla.cu in many shapes, check and time each on a GPU:  python -m tests.kernels.tune_mla.

Needs CuPy. Every shape first has to write what the torch executor writes, for a small step. Times
are medians of CUDA events around single launches on data far beyond the L2, beside a copy of as
many bytes. The end names the best shape for each entry of TUNED in mla.py.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from ropegraph.dtypes import DType
from ropegraph.engines.cuda_rope.compiler import Loaded
from ropegraph.engines.cuda_rope.cupy_types import import_cupy
from ropegraph.engines.cuda_rope.mla import Mode, Tuning, task_of
from ropegraph.engines.cuda_rope.mla_launch import MlaLaunch
from ropegraph.engines.cuda_rope.mla_variant import MlaVariant, variant_of_task
from ropegraph.engines.torch_executor.engine import TorchExecutor
from ropegraph.lowering.engine import Device
from tests.kernels.bench_rope import stream
from tests.kernels.cases import Case
from tests.kernels.mla_large import backward, forward, mxfp8
from tests.kernels.nvrtc import cubin

MAKE = {Mode.FORWARD: forward, Mode.MXFP8: mxfp8, Mode.BACKWARD: backward}
SIZES = ((2, 128, 4096), (4, 16, 8192))
LAYOUTS = {"sbhd": "heads", "bshd": "heads", "bhsd": "tokens"}
REPEATS = 9
Key = tuple[Mode, str]


def shapes(mode: Mode, near: str) -> list[Tuning]:
    """What is tried where the next of `near` (heads, tokens) lies closest."""
    if mode is Mode.MXFP8:
        kept = ((8, 0), (8, 28), (8, 32), (16, 0), (16, 16), (16, 20))
        return [
            Tuning(vec=vec, resident=resident, warps=warps, units=units, log_group=group)
            for (vec, resident), warps, units in product(kept, (2, 4, 8), (4, 8, 16))
            for group in ((0, 2) if near == "tokens" else (0,))
        ]
    tokens = (1, 2, 4) if near == "tokens" else (1,)
    groups = (0, 3, 5, 8, 10) if near == "tokens" else (0,)
    return [
        Tuning(flight, flight * times, t, warps, resident, 8 if flight == 8 else 4, 8, group, inner)
        for flight, times, t, warps, resident, group, inner in product(
            (2, 4, 8), (1, 2), tokens, (1, 2, 4), (0, 24, 32), groups, (False, True)
        )
        # Not all of the product: what loses in rope.cu as well is left out.
        if t <= flight and flight * times <= 8 and not (near == "tokens" and warps == 2)
        and not (near == "tokens" and not inner and group) and not (flight == 8 and resident == 32)
    ]  # fmt: skip


def variant(mode: Mode, shape: Tuning) -> MlaVariant:
    """What has to be compiled: that of shapes which differ in the cut alone is the same."""
    same = replace(shape, units=8, log_group=0, is_batch_inner=False)
    if mode is not Mode.MXFP8:
        return MlaVariant(mode, DType.BFLOAT16, DType.FLOAT, 8, same)
    scales = shape.units * (192 + 128) // 32  # of the key and the value of so many heads
    return MlaVariant(mode, DType.BFLOAT16, DType.FLOAT, shape.vec, same, turn=64, scales=scales)


def compiled(given: tuple[MlaVariant, str]) -> str:
    """The machine code, in a file."""
    one, where = given
    code, log = cubin(one, "sm_90")
    name = Path(where) / f"{abs(hash(one))}-{os.getpid()}-{time.monotonic_ns()}.cubin"
    name.write_bytes(code)
    name.with_suffix(".log").write_text(log)
    return str(name)


@cache
def loaded(name: str) -> tuple[Loaded, object]:
    """The kernels of a file, and the module, for whose life they are there."""
    cupy = import_cupy()
    module = cupy.RawModule(path=name)
    names = ("mla_vector", "mla_any")
    kernels = {name: module.get_function(name).kernel.ptr for name in names}
    driver = cupy.cuda.driver
    return Loaded(driver, driver.ctxGetCurrent(), kernels), module


def launcher(given: Case, shape: Tuning, files: dict[MlaVariant, str]) -> MlaLaunch:
    task = replace(task_of(given.step), tuning=shape)
    compiled_for = variant(task.mode, shape)
    assert variant_of_task(task).macros == compiled_for.macros
    kernels, _ = loaded(files[compiled_for])
    return MlaLaunch("tune", task, kernels)


def small(mode: Mode, layout: str) -> tuple[Case, dict[str, Tensor]]:
    """A step that leaves tiles and groups half full, and what it must write."""
    given = MAKE[mode](3, 21, 288, layout)
    for port in given.step.node.inputs:
        if port in ("kv", "dKey"):
            x = given.at(port)  # copied, zero, Inf, NaN, subnormal
            x[0, 0, :32, :40] = 0
            x[0, 1, 5, 3], x[1, 2, 40, 40], x[2, 3, 9, 100] = torch.inf, torch.nan, -torch.inf
            x[0, 3, :64] *= 1e-37
            x[1, 4, :64] *= 1e-39
    want = Case(given.step, [t.clone() for t in given.env])
    TorchExecutor().compile(want.step, Device("cuda"))(want.env, stream())
    return given, {port: want.at(port) for port in want.written}


def why_wrong(given: Case, want: dict[str, Tensor], launch: MlaLaunch) -> str:
    for port in want:
        given.at(port).fill_(0xA5 if given.at(port).dtype == torch.uint8 else torch.nan)
    launch(given.env, stream())
    torch.cuda.synchronize()
    for port, exact in want.items():
        got = given.at(port)
        is_right = got == exact
        if got.is_floating_point():
            is_right |= got.isnan() & exact.isnan()
        if port == "dK_rope":
            is_right |= (got.float() - exact.float()).abs() <= 0.02 * exact[exact.isfinite()].max()
        if not is_right.all():
            return f"{int((~is_right).sum())} of {is_right.numel()} of {port}"
    return ""


def median(run: Callable[[], object]) -> float:
    """Of REPEATS runs, in us."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS + 2)]
    for first, last in events:
        first.record()
        run()
        last.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(first.elapsed_time(last) for first, last in events[2:])


def text(mode: Mode, shape: Tuning) -> str:
    names = ("units", "warps", "resident", "log_group", "is_batch_inner")
    more = ("vec",) if mode is Mode.MXFP8 else ("flight", "tokens")
    more += ("sum_flight",) if mode is Mode.BACKWARD else ()
    return "Tuning(" + ", ".join(f"{n}={getattr(shape, n)}" for n in (*more, *names)) + ")"


def compile_all(where: str) -> dict[MlaVariant, str]:
    """Before CUDA starts: the processes are forks."""
    needed = dict.fromkeys(
        variant(mode, shape)
        for mode, near in product(Mode, ("heads", "tokens"))
        for shape in shapes(mode, near)
    )
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        files = pool.map(compiled, [(one, where) for one in needed], chunksize=1)
    for one, name in zip(needed, files, strict=True):
        log = Path(name).with_suffix(".log").read_text().partition("'mla_vector'")[2]
        words = log.replace(",", "").split()
        used = words[words.index("Used") + 1] if "Used" in words else "?"
        print(f"{one.mode.name} vec {one.vec} {text(one.mode, one.tuning)}: {used} registers")
    return dict(zip(needed, files, strict=True))


def best(ratios: dict[Tuning, list[float]]) -> list[Tuning]:
    """By the mean of the ratios over sizes and layouts."""
    most = max(len(r) for r in ratios.values())
    full = [shape for shape, r in ratios.items() if len(r) == most]
    return sorted(full, key=lambda shape: statistics.mean(ratios[shape]))


def tune(files: dict[MlaVariant, str], modes: Iterable[Mode]) -> None:
    found: dict[Key, dict[Tuning, list[float]]] = defaultdict(lambda: defaultdict(list))
    for mode, layout in product(modes, LAYOUTS):
        near = LAYOUTS[layout]
        given, want = small(mode, layout)
        right: list[Tuning] = []
        for shape in shapes(mode, near):
            wrong = why_wrong(given, want, launcher(given, shape, files))
            if wrong:
                print(f"WRONG {mode.name} {layout} {text(mode, shape)}: {wrong}")
            else:
                right.append(shape)
        for b, h, s in SIZES:
            given = MAKE[mode](b, h, s, layout)
            size = sum(t.numel() * t.element_size() for t in given.env)
            halves = torch.empty(2, size // 2, device="cuda", dtype=torch.uint8)
            copy = median(lambda halves=halves: halves[0].copy_(halves[1]))
            del halves
            times: dict[Tuning, float] = {}
            for shape in right:
                launch, handle = launcher(given, shape, files), stream()
                times[shape] = median(lambda f=launch, e=given.env, q=handle: f(e, q))
                found[mode, near][shape].append(times[shape] / copy)
            print(f"{mode.name} {layout} b{b} h{h} s{s}: {size / 1e6:.0f} MB, copy {copy:.1f} us")
            order = sorted(times, key=lambda shape: times[shape])
            for shape in (*order[:8], *order[-1:]):
                print(f"  {times[shape] / copy:.3f} {times[shape]:7.1f} us  {text(mode, shape)}")
            del given
    print("\nBest by the mean over sizes and layouts, and its ratio in each:")
    for (mode, near), ratios in found.items():
        for shape in best(ratios)[:3]:
            each = " ".join(f"{x:.3f}" for x in ratios[shape])
            print(f"({mode}, {near!r}): {text(mode, shape)},  # {each}")


def main() -> None:
    start = time.monotonic()
    modes = [Mode[name.upper()] for name in sys.argv[1:]] or list(Mode)
    with tempfile.TemporaryDirectory() as where:
        files = compile_all(where)
        print(f"compiled {len(files)} in {time.monotonic() - start:.1f} s", flush=True)
        torch.manual_seed(0)
        torch.cuda.init()
        print(torch.cuda.get_device_name(), torch.__version__)
        tune(files, modes)
    print(f"{time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
