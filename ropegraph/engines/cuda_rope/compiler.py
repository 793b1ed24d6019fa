"""Kernels compiled by CuPy: what every source file here needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from ropegraph.engines.cuda_rope.cupy_types import Driver, device_guard, import_cupy
from ropegraph.engines.cuda_rope.unit import Unit


@dataclass(frozen=True)
class Loaded:
    """The kernels of a unit in the context of one GPU.  kernels: name -> CUfunction."""

    driver: Driver
    context: int
    kernels: Mapping[str, int]


@cache
def load(unit: Unit, index: int) -> Loaded:
    """Compile and load, once per unit and GPU; CuPy keeps what it compiled on disk.

    Raises UnsupportedError where CuPy is missing.
    """
    cupy = import_cupy()
    with device_guard(cupy, index):
        # Makes the context of this GPU current: the primary one, which is that of torch too.
        torch.cuda.synchronize(index)
        module = cupy.RawModule(code=unit.code, options=unit.options, backend="nvrtc")
        kernels = {name: module.get_function(name).kernel.ptr for name in unit.kernels}
        driver = cupy.cuda.driver
        return Loaded(driver, driver.ctxGetCurrent(), kernels)
