"""norm_rope.cu on the CPU, in the way of host.py: built by g++ under sanitizers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ropegraph.engines.cuda_rope.compiler import Loaded
from ropegraph.engines.cuda_rope.norm_launch import NormLaunch, NormParams, active
from ropegraph.engines.cuda_rope.norm_shape import norm_shape, widest_vector
from ropegraph.engines.cuda_rope.norm_variant import NormVariant, norm_variant, source
from ropegraph.lowering.engine import Step
from tests.kernels import host
from tests.kernels.cases import Case

KERNELS = {1: "norm_vector", 2: "norm_any", 3: "norm_sum", 4: "mean_vector", 5: "mean_any"}


class Recorder(host.Recorder):
    """A driver that writes down the parameters of norm_rope.cu."""

    block = NormParams


def launcher(step: Step, driver: Recorder, flag: Tensor | None = None) -> NormLaunch:
    """The launcher that build_norm() would make, on a recording driver."""
    jobs = active(step)
    watched = any(job.rope.is_watched for job in jobs)
    loaded = Loaded(driver, 1, {name: number for number, name in KERNELS.items()})
    return NormLaunch(step.name, jobs, loaded, widest_vector(jobs), flag if watched else None)


def variant_for(step: Step) -> NormVariant:
    """The variant that build_norm() would compile."""
    jobs = active(step)
    return norm_variant(jobs, norm_shape(jobs, widest_vector(jobs)))


def run(cases: Sequence[Case], where: Path) -> list[tuple[str, ...]]:
    """Run every case, each on its own variant. Returns the kernels that each took."""
    recorded: list[list[tuple[NormVariant, host.Launch]]] = []
    extra: list[list[Tensor]] = []
    for given in cases:
        driver = Recorder()
        launch = launcher(given.step, driver, given.flag)
        # As long as asked for and no longer, so that the sanitizer sees one byte too many.
        scratch = torch.full((launch.workspace_bytes // 4,), torch.nan)
        launch([*given.env, scratch], 0)
        recorded.append([(variant_for(given.step), each) for each in driver.launches])
        starts = {offset // 4 for k in (launch.fast, launch.slow) for _, offset in k.scratch}
        extra.append([scratch, *(scratch[start:] for start in starts)])
    used = dict.fromkeys((v, each.function) for all_ in recorded for v, each in all_)
    program = build(list(used), where)
    # One launch of each case after the other: a second one reads what the first one wrote.
    for turn in range(max(map(len, recorded))):
        data: list[bytes] = []
        written: list[Tensor] = []
        for given, launches, scratch in zip(cases, recorded, extra, strict=True):
            if turn < len(launches):
                variant, launch = launches[turn]
                nth = list(used).index((variant, launch.function))
                tensors = [*given.env, given.flag, *scratch]
                record, stores = host.record_of(nth, launch, tensors, has_third=False)
                data.append(record)
                written += stores
        host.execute(program, where, data, written)
    return [tuple(KERNELS[each.function] for _, each in launches) for launches in recorded]


def build(kernels: Sequence[tuple[NormVariant, int]], where: Path) -> Path:
    """The program with these kernels of these variants in it."""
    lines: list[str] = []
    entries: dict[tuple[NormVariant, int], str] = {}
    for i, variant in enumerate(dict.fromkeys(v for v, _ in kernels)):
        names = {name: f"{name}_{i}" for name in KERNELS.values()}
        macros = variant.macros | names
        lines += (f"#define {name} {value}" for name, value in macros.items())
        lines += (f"namespace v{i} {{", '#include "norm_all.cu"', "NormParams held;")
        for function, name in KERNELS.items():
            if (variant, function) not in kernels:
                continue
            lines += (
                f"void run_{function}(const char* params, Dim3 grid, unsigned threads) {{",
                "  memcpy(&held, params, sizeof held);",
            )
            if name == "norm_sum":
                lines += (
                    "  static Sums sums;",
                    "  host::launch({[] { sum_rows(held, sums); }, [] { sum_warps(held, sums); }},",
                    "               grid, threads);",
                )
            else:
                lines.append(f"  host::launch([] {{ {name}(held); }}, grid, threads);")
            lines.append("}")
            entries[variant, function] = f"  {{v{i}::run_{function}, sizeof(v{i}::NormParams)}},"
        lines.append("}")
        lines += (f"#undef {name}" for name in macros)
    (where / "norm_all.cu").write_text(source())
    return host.compiled(where, lines, [entries[kernel] for kernel in kernels])
