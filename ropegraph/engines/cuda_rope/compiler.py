"""Kernels compiled by CuPy, and the flag that they raise: what every source file here needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ropegraph.engines.cuda_rope.cupy_types import Driver, device_guard, import_cupy


@dataclass(frozen=True)
class Compiled:
    """Kernels in the context of one GPU.  kernels: name -> CUfunction."""

    driver: Driver
    context: int
    kernels: Mapping[str, int]


def compile_kernels(
    code: str, options: tuple[str, ...], names: Iterable[str], index: int
) -> Compiled:
    """Compile and load; CuPy keeps what it compiled on disk.

    Raises UnsupportedError where CuPy is missing.
    """
    cupy = import_cupy()
    with device_guard(cupy, index):
        # Makes the context of this GPU current: the primary one, which is that of torch too.
        torch.cuda.synchronize(index)
        module = cupy.RawModule(code=code, options=options, backend="nvrtc")
        kernels = {name: module.get_function(name).kernel.ptr for name in names}
        driver = cupy.cuda.driver
        return Compiled(driver, driver.ctxGetCurrent(), kernels)


def new_flag(index: int) -> torch.Tensor:
    """One int32 on a GPU, 0, there for every stream."""
    where = torch.device("cuda", index)
    flag = torch.zeros(1, dtype=torch.int32, device=where)
    torch.cuda.synchronize(where)
    return flag
