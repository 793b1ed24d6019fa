"""mla.cu on the CPU, in the way of host.py: built by g++ under sanitizers, fed by the launcher."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ropegraph.engines.cuda_rope.launch import Loaded
from ropegraph.engines.cuda_rope.mla import SOURCE, MlaVariant, task_of, variant_of_task
from ropegraph.engines.cuda_rope.mla_launch import MlaLaunch, MlaParams
from tests.kernels import host
from tests.kernels.cases import Case
from tests.missing import missing


class Recorder(host.Recorder):
    """A driver that writes down the parameters of mla.cu."""

    def launchKernel(
        self, f: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int,
        shared_bytes: int, stream: int, params: int, extra: int,
    ) -> None:  # fmt: skip
        block = ctypes.c_void_p.from_address(params).value
        assert block is not None
        data = ctypes.string_at(block, ctypes.sizeof(MlaParams))
        self.launches.append(host.Launch(f, (gx, gy, gz), bx, stream, data))


def launcher(case: Case, driver: Recorder) -> MlaLaunch:
    loaded = Loaded(driver, 1, host.VECTOR, host.SINGLE)
    return MlaLaunch(case.step.name, task_of(case.step), loaded)


def run(cases: Sequence[Case], where: Path) -> list[int]:
    """Run every case, each on its own variant. Returns the kernel each took: VECTOR or SINGLE."""
    own = [variant_of_task(task_of(case.step)) for case in cases]
    variants = list(dict.fromkeys(own))
    program = build(variants, where)
    data: list[bytes] = []
    taken: list[int] = []
    written: list[Tensor] = []
    for case, variant in zip(cases, own, strict=True):
        driver = Recorder()
        launcher(case, driver)(case.env, 0)
        (launch,) = driver.launches
        taken.append(launch.function)
        nth = 2 * variants.index(variant) + launch.function - 1
        record, stores = host._record(nth, launch, case.env)
        data.append(record)
        written += stores
    (where / "in").write_bytes(host._numbers(len(data)) + b"".join(data))
    host._execute(program, where)
    back = memoryview((where / "out").read_bytes())
    for store in written:
        ctypes.memmove(store.data_ptr(), bytes(back[: store.numel()]), store.numel())
        back = back[store.numel() :]
    assert not back
    return taken


def build(variants: Sequence[MlaVariant], where: Path) -> Path:
    """The program with these variants in it."""
    compiler = shutil.which("g++")
    if compiler is None:
        missing("g++")
    lines: list[str] = ['#include "host_mla.h"']
    entries: list[str] = []
    for i, variant in enumerate(variants):
        macros = variant.macros | {"mla_vector": f"mla_vector_{i}", "mla_any": f"mla_any_{i}"}
        lines += (f"#define {name} {value}" for name, value in macros.items())
        lines += (f"namespace v{i} {{", f'#include "{SOURCE.name}"', "Params held;")
        for kernel in ("vector", "any"):
            name = "any" if variant.vec == 1 else kernel
            lines += (
                f"void run_{kernel}(const char* params, Dim3 grid, unsigned threads) {{",
                "  memcpy(&held, params, sizeof held);",
                f"  host::launch([] {{ mla_{name}(held); }}, grid, threads);",
                "}",
            )
            entries.append(f"  {{v{i}::run_{kernel}, sizeof(v{i}::Params)}},")
        lines.append("}")
        lines += (f"#undef {name}" for name in macros)
    lines += (
        "struct Kernel {",
        "  void (*run)(const char*, Dim3, unsigned);",
        "  size_t params_bytes;",
        "};",
        "const Kernel kKernels[] = {", *entries, "};",
    )  # fmt: skip
    (where / "variants.inc").write_text("\n".join(lines) + "\n")
    program = where / "program"
    includes = (f"-I{where}", f"-I{host.HERE}", f"-I{SOURCE.parent}", f"-I{host.cuda_headers()}")
    done = subprocess.run(
        [compiler, *host.FLAGS, *includes, host.HERE / "host_main.cpp", "-o", program],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:6000]
    return program
