"""mla.cu on the CPU, in the way of host.py: built by g++ under sanitizers, fed by the launcher."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ropegraph.engines.cuda_rope.compiler import Loaded
from ropegraph.engines.cuda_rope.mla import Mode, task_of
from ropegraph.engines.cuda_rope.mla_launch import MlaLaunch, MlaParams
from ropegraph.engines.cuda_rope.mla_variant import SOURCE, MlaVariant, variant_of_task
from tests.kernels import host
from tests.kernels.cases import Case


class Recorder(host.Recorder):
    """A driver that writes down the parameters of mla.cu."""

    block = MlaParams


def launcher(case: Case, driver: Recorder) -> MlaLaunch:
    loaded = Loaded(driver, 1, {"mla_vector": host.VECTOR, "mla_any": host.SINGLE})
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
        record, stores = host.record_of(nth, launch, case.env)
        data.append(record)
        written += stores
    host.execute(program, where, data, written)
    return taken


def build(variants: Sequence[MlaVariant], where: Path) -> Path:
    """The program with these variants in it."""
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
            )
            if variant.mode is Mode.MXFP8 and name == "vector":
                phases = ("values", "keys", "key_scales")
                calls = ", ".join(f"[] {{ {phase}(held, shared); }}" for phase in phases)
                lines += (
                    f"  static Shared<{variant.vec}> shared;",
                    f"  host::launch({{{calls}}}, grid, threads);",
                )
            else:
                lines.append(f"  host::launch([] {{ mla_{name}(held); }}, grid, threads);")
            lines.append("}")
            entries.append(f"  {{v{i}::run_{kernel}, sizeof(v{i}::Params)}},")
        lines.append("}")
        lines += (f"#undef {name}" for name in macros)
    return host.compiled(where, lines, entries)
