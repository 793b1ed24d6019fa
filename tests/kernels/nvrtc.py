"""rope.cu and mla.cu compiled by NVRTC, which needs no driver, with what ptxas says of each kernel.

The library is called through ctypes: torch would import cuda-bindings wherever it is installed.
"""

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ropegraph.engines.cuda_rope.mla import MlaVariant
from ropegraph.engines.cuda_rope.norm import NormVariant
from ropegraph.engines.cuda_rope.variant import SOURCE, Variant
from tests.kernels.host import cuda_headers
from tests.missing import missing

_KERNEL = re.compile(r"Compiling entry function '(\w+)'(.*?)Compile time", re.DOTALL)


@dataclass(frozen=True)
class Resources:
    """Of one kernel.  spill, shared: bytes, a thread and a block."""

    registers: int
    spill: int
    shared: int


@cache
def load() -> ctypes.CDLL:
    """libnvrtc from the package index."""
    where = cuda_headers().parent / "lib"
    # NVRTC asks for its builtins by name alone: they must be loaded by then.
    for name in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):
        found = sorted(where.glob(name))
        if not found:
            missing("nvidia-cuda-nvrtc")
        library = ctypes.CDLL(str(found[0]))
    return library


def compile_variant(
    variant: Variant | MlaVariant | NormVariant, arch: str, path: Path = SOURCE
) -> dict[str, Resources]:
    """Machine code for ``arch``; the resources of each kernel by name.

    Raises AssertionError with the compiler's text if it does not compile.
    """
    nvrtc = load()
    options = (*variant.options, f"-arch={arch}", f"-I{cuda_headers()}", "--ptxas-options=-v")
    program = ctypes.c_void_p()
    source, name = path.read_bytes(), path.name.encode()
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None)
    assert made == 0
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.value.decode()
    assert failed == 0, f"{variant} on {arch}: {text[:3000]}"
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    assert size.value > 0
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return {name: _resources(part) for name, part in _KERNEL.findall(text)}


def _resources(text: str) -> Resources:
    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found[1]) if found else 0

    return Resources(
        registers=number(r"Used (\d+) registers"),
        spill=number(r"(\d+) bytes spill stores"),
        shared=number(r"(\d+) bytes smem"),
    )
