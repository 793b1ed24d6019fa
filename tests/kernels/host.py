"""rope.cu on the CPU: built by g++ under sanitizers, fed with the launches of the real launcher.

The launcher runs on CPU tensors with a driver that records instead of launching. What it recorded
(parameter block, grid, kernel) and the bytes of the tensors go to a separate program, for a
sanitized library kills a Python that is not. The program's results go back into the tensors.
"""

import atexit
import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import ClassVar

import torch
from torch import Tensor

from ropegraph.engines.cuda_rope.compiler import Loaded
from ropegraph.engines.cuda_rope.job import Job, jobs_of
from ropegraph.engines.cuda_rope.launch import DenseLaunch, launch_of
from ropegraph.engines.cuda_rope.params import JobParams, Params
from ropegraph.engines.cuda_rope.shape import shape_of, widest_vector
from ropegraph.engines.cuda_rope.variant import SOURCE, Variant, variant_of
from ropegraph.lowering.engine import Step
from tests.kernels.cases import Case
from tests.missing import missing

HERE = Path(__file__).parent
FLAGS = (
    "-std=c++17", "-O0", "-g1", "-ffp-contract=off", "-fno-strict-aliasing", "-w",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer",
)  # fmt: skip


def cuda_headers() -> Path:
    """NVIDIA's headers from the package index; they need no driver."""
    try:
        found = import_module("nvidia.cu13")
    except ImportError:
        missing("nvidia-cuda-runtime's headers")
    return Path(next(iter(found.__path__))) / "include"


@dataclass
class Launch:
    """What the driver was asked for."""

    function: int
    grid: tuple[int, int, int]
    threads: int
    stream: int
    params: bytes


@dataclass
class Recorder:
    """A CUDA driver that writes down what it is asked for.  context: the current one."""

    block: ClassVar[type[ctypes.Structure]] = Params

    context: int = 1
    launches: list[Launch] = field(default_factory=list[Launch])
    contexts: list[int] = field(default_factory=list[int])

    CUDADriverError = RuntimeError

    def ctxGetCurrent(self) -> int:
        return self.context

    def ctxSetCurrent(self, ctx: int) -> None:
        self.context = ctx
        self.contexts.append(ctx)

    def launchKernel(
        self, f: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int,
        shared_bytes: int, stream: int, params: int, extra: int,
    ) -> None:  # fmt: skip
        assert (by, bz, shared_bytes, extra) == (1, 1, 0, 0)
        address = ctypes.c_void_p.from_address(params).value
        assert address is not None
        data = ctypes.string_at(address, ctypes.sizeof(self.block))
        self.launches.append(Launch(f, (gx, gy, gz), bx, stream, data))


VECTOR, SINGLE = 1, 2  # handles of the two kernels


def launcher(step: Step, driver: Recorder, flag: Tensor | None = None) -> DenseLaunch:
    """The launcher that build() would make, on a recording driver."""
    jobs = active_jobs(step)
    loaded = Loaded(driver, 1, {"rope_vector": VECTOR, "rope_any": SINGLE})
    shape = shape_of(jobs, widest_vector(jobs))

    def new_flag() -> Tensor:
        assert flag is not None
        return flag

    return launch_of(step.name, jobs, loaded, shape, new_flag)


def active_jobs(step: Step) -> tuple[Job, ...]:
    return tuple(job for job in jobs_of(step) if not job.is_empty)


def variant_for(step: Step) -> Variant:
    """The variant that build() would compile."""
    jobs = active_jobs(step)
    return variant_of(jobs, shape_of(jobs, widest_vector(jobs)))


def launch_for(case: Case) -> Launch:
    """The launch that the real launcher asks for."""
    driver = Recorder()
    launcher(case.step, driver, case.flag)(case.env, 0)
    (launch,) = driver.launches
    return launch


def kernel_of(case: Case) -> int:
    """VECTOR or SINGLE."""
    return launch_for(case).function


def run(cases: Sequence[Case], where: Path) -> list[int]:
    """Run every case, each on its own variant. Returns the kernel each took: VECTOR or SINGLE."""
    launches = [launch_for(case) for case in cases]
    wanted = [
        (variant_for(case.step), launch.function)
        for case, launch in zip(cases, launches, strict=True)
    ]
    kernels = list(dict.fromkeys(wanted))
    program = build(kernels, where)
    data: list[bytes] = []
    written: list[Tensor] = []
    for case, launch, kernel in zip(cases, launches, wanted, strict=True):
        has_third = kernel[0].cache is not None
        tensors = [*case.env, case.flag]
        record, stores = record_of(kernels.index(kernel), launch, tensors, has_third=has_third)
        data.append(record)
        written += stores
    execute(program, where, data, written)
    return [function for _, function in wanted]


def execute(program: Path, where: Path, records: Sequence[bytes], stores: Sequence[Tensor]) -> None:
    """Run the program on these launches, and put what it wrote back into their storages."""
    (where / "in").write_bytes(_numbers(len(records)) + b"".join(records))
    # Leaks are no matter here, and the leak checker cannot run where a debugger may not attach.
    env = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [program, where / "in", where / "out"]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:6000]
    back = memoryview((where / "out").read_bytes())
    for store in stores:
        ctypes.memmove(store.data_ptr(), bytes(back[: store.numel()]), store.numel())
        back = back[store.numel() :]
    assert not back


def record_of(
    nth: int, launch: Launch, tensors: Sequence[Tensor], *, has_third: bool = True
) -> tuple[bytes, list[Tensor]]:
    """A launch for the program, and the bytes of each storage it touches, in order.

    has_third: the kernel's Params has the third job.
    """
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    stores = [torch.tensor([], dtype=torch.uint8).set_(s) for s in storages.values()]
    patches: list[int] = []
    words = struct.unpack(f"{len(launch.params) // 8}Q", launch.params)
    addresses = {t.data_ptr() for t in tensors}
    for word, content in enumerate(words):
        if content not in addresses or content == 0:
            continue
        for i, store in enumerate(stores):
            if 0 <= content - store.data_ptr() < max(store.numel(), 1):
                patches += (word, i, content - store.data_ptr())
    params = launch.params if has_third else launch.params[: -ctypes.sizeof(JobParams)]
    record = [_numbers(nth, *launch.grid, launch.threads, len(params)), params]
    record.append(_numbers(len(stores)))
    for store in stores:
        content = ctypes.string_at(store.data_ptr(), store.numel())
        record += (_numbers(len(content)), content)
    record.append(_numbers(len(patches) // 3, *patches))
    return b"".join(record), stores


def _numbers(*values: int) -> bytes:
    return struct.pack(f"{len(values)}q", *values)


def build(kernels: Sequence[tuple[Variant, int]], where: Path) -> Path:
    """The program with these kernels of these variants in it."""
    lines: list[str] = []
    entries: dict[tuple[Variant, int], str] = {}
    for i, variant in enumerate(dict.fromkeys(variant for variant, _ in kernels)):
        macros = variant.macros | {"rope_vector": f"rope_vector_{i}", "rope_any": f"rope_any_{i}"}
        lines += (f"#define {name} {value}" for name, value in macros.items())
        lines += (f"namespace v{i} {{", f'#include "{SOURCE.name}"', "Params held;")
        for function, name in ((VECTOR, "vector"), (SINGLE, "any")):
            if (variant, function) not in kernels:
                continue
            lines += (
                f"void run_{name}(const char* params, Dim3 grid, unsigned threads) {{",
                "  memcpy(&held, params, sizeof held);",
                f"  host::launch([] {{ rope_{name}(held); }}, grid, threads);",
                "}",
            )
            entries[variant, function] = f"  {{v{i}::run_{name}, sizeof(v{i}::Params)}},"
        lines.append("}")
        lines += (f"#undef {name}" for name in macros)
    return compiled(where, lines, [entries[kernel] for kernel in kernels])


def compiled(where: Path, lines: Sequence[str], entries: Sequence[str]) -> Path:
    """The program with these lines and this table of kernels."""
    table = (
        "struct Kernel {",
        "  void (*run)(const char*, Dim3, unsigned);",
        "  size_t params_bytes;",
        "};",
        "const Kernel kKernels[] = {", *entries, "};",
    )  # fmt: skip
    (where / "variants.inc").write_text("\n".join([*lines, *table]) + "\n")
    # The source is found by name alone, beside nothing: its headers come from the first folder.
    main, program = where / "main.cpp", where / "program"
    main.write_bytes((HERE / "host_main.cpp").read_bytes())
    headers = (_compiled_headers(), where, SOURCE.parent, HERE)
    _compile(*(f"-I{folder}" for folder in headers), main, "-o", program)
    return program


@cache
def _compiled_headers() -> Path:
    """A folder with host_cuda.h and what it includes parsed already, for every program of a run."""
    where = Path(mkdtemp(prefix="ropegraph-host-"))
    atexit.register(shutil.rmtree, where, ignore_errors=True)
    (where / "host_cuda.h").write_bytes((HERE / "host_cuda.h").read_bytes())
    _compile("-x", "c++-header", where / "host_cuda.h", "-o", where / "host_cuda.h.gch")
    return where


def _compile(*arguments: str | Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        missing("g++")
    done = subprocess.run(
        [compiler, *FLAGS, f"-I{cuda_headers()}", *arguments],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:6000]
