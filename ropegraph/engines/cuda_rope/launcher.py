"""What launches the kernels of a step, whichever source file they are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ropegraph.engines.cuda_rope.block import Kernel
from ropegraph.engines.cuda_rope.compiler import Loaded
from ropegraph.errors import InternalError

K = TypeVar("K", bound=Kernel)

# Bits that a kernel sets in its flag.
FAULTS = {
    1: "ragged offsets or cu_seqlens are negative or decrease",
    2: "a ragged or packed sequence ends past its buffer",
    4: "a position lies outside of the table",
    8: "the length of a sequence is no multiple of 2 cp_size",
    16: "cache_positions outside of the cache; their rows were not written",
}


class Launcher(Generic[K]):
    """Launches the kernels of a step, in the context of one GPU.

    fast: takes vectors; slow: takes any address.  Both are one where no vector fits the strides.
    flag: one int32 on the device that collects what was wrong with positions and offsets; None
    where none are read.
    """

    launches_by_address = True

    def __init__(
        self, name: str, loaded: Loaded, slow: K, fast: K, flag: Tensor | None = None
    ) -> None:
        self.name, self.driver, self.context = name, loaded.driver, loaded.context
        self.slow, self.fast, self.flag = slow, fast, flag

    def patched(self, env: Sequence[Tensor]) -> K:
        """The kernel that the alignment of these tensors allows, their addresses in its block."""
        kernel = self.fast
        if kernel.patch(env) and kernel is not self.slow:
            kernel = self.slow
            kernel.patch(env)
        return kernel

    def launch(
        self, function: int, blocks: tuple[int, int, int], threads: int, stream: int, arguments: int
    ) -> None:
        """Launch in the context that owns the kernel, whichever is current in this thread."""
        driver = self.driver
        current = driver.ctxGetCurrent()
        if current != self.context:
            driver.ctxSetCurrent(self.context)
        try:
            driver.launchKernel(function, *blocks, threads, 1, 1, 0, stream, arguments, 0)
        except Exception as error:
            raise InternalError(
                f"cuda.rope could not launch {self.name!r} (blocks {blocks}, stream {stream:#x}): "
                f"{error}"
            ) from error
        finally:
            if current != self.context:
                driver.ctxSetCurrent(current)

    def faults(self) -> tuple[str, ...]:
        """What was wrong since the build. Waits for the device."""
        if self.flag is None:
            return ()
        bits = int(self.flag.item())
        return tuple(text for bit, text in FAULTS.items() if bits & bit)


class Nothing:
    """Nothing to rotate, nothing to launch."""

    launches_by_address = True

    def __call__(self, env: Sequence[Tensor], stream: int) -> None:
        return


def new_flag(index: int) -> Tensor:
    """One int32 on a GPU, 0, there for every stream."""
    where = torch.device("cuda", index)
    flag = torch.zeros(1, dtype=torch.int32, device=where)
    torch.cuda.synchronize(where)
    return flag


def address_of(flag: Tensor | None) -> int:
    """The address of a flag for the block of a kernel; 0 where there is none."""
    return 0 if flag is None else flag.data_ptr()
