"""A kernel with its arguments, packed at build: a call patches addresses and nothing else."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

WORD = 8  # pointers and strides are words of 8 bytes; a patch names the word


class Pointer(NamedTuple):
    """A word of the block that holds the address of the tensor in ``slot``.

    mask: bits of the address that must be 0 for the vector kernel.
    """

    word: int
    slot: int
    mask: int = 0


def word_of(kind: type[ctypes.Structure], field: str) -> int:
    """The word of a structure at which a field begins."""
    return getattr(kind, field).offset // WORD


def magic(divisor: int) -> int:
    """m with x * m >> 64 == x // divisor for x < 2^32: it spares a kernel a division; 0 for 1."""
    return 0 if divisor <= 1 else -(-(2**64) // divisor)


class Block(threading.local):
    """A thread's own copy of the parameters: another thread may be in a launch meanwhile."""

    def __init__(self, kind: type[ctypes.Structure], template: bytes) -> None:
        self.params: Any = kind.from_buffer_copy(template)
        self.words = (ctypes.c_uint64 * (len(template) // WORD)).from_buffer(self.params)
        self.arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))
        self.address = ctypes.addressof(self.arguments)


class Kernel:
    """A kernel for given work.  blocks: of its grid.  threads: of a block."""

    def __init__(
        self,
        function: int,
        blocks: tuple[int, int, int],
        threads: int,
        params: ctypes.Structure,
        pointers: Iterable[Pointer],
    ) -> None:
        self.function, self.blocks, self.threads = function, blocks, threads
        self.block = Block(type(params), bytes(params))
        # Plain tuples are unpacked faster, at every call.
        self.pointers = tuple((p.word, p.slot, p.mask) for p in pointers)

    def patch(self, env: Sequence[Tensor]) -> int:
        """Fill in every address; the bits that should have been 0."""
        words, low_bits = self.block.words, 0
        for word, slot, mask in self.pointers:
            address = env[slot].data_ptr()
            words[word] = address
            low_bits |= address & mask
        return low_bits
