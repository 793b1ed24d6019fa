"""rope.cu and mla.cu compiled by NVRTC, which needs no driver, with what ptxas says of each kernel.

The library is called through ctypes: torch would import cuda-bindings wherever it is installed.
"""

import ctypes
import re
from dataclasses import dataclass
from functools import cache

from ropegraph.engines.cuda_rope.mla_variant import MlaVariant
from ropegraph.engines.cuda_rope.unit import Unit
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


def compile_variant(variant: Unit, arch: str) -> dict[str, Resources]:
    """Machine code for ``arch``; the resources of each kernel by name.

    Raises AssertionError with the compiler's text if it does not compile.
    """
    program, log = _compiled(variant, f"-arch={arch}", "--ptxas-options=-v")
    nvrtc, size = load(), ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    assert size.value > 0
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return {name: _resources(part) for name, part in _KERNEL.findall(log)}


def cubin(variant: MlaVariant, arch: str) -> tuple[bytes, str]:
    """Machine code with the option that CuPy adds, and what ptxas says of it."""
    program, log = _compiled(variant, f"-arch={arch}", "-ftz=true", "--ptxas-options=-v")
    nvrtc, size = load(), ctypes.c_size_t()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw, log


def ptx_as_cupy_makes_it(variant: Unit) -> str:
    """PTX with the option that CuPy adds to those of its callers."""
    program, _ = _compiled(variant, "-arch=compute_90", "-ftz=true")
    nvrtc, size = load(), ctypes.c_size_t()
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return text.value.decode()


def _compiled(variant: Unit, *more: str) -> tuple[ctypes.c_void_p, str]:
    """The program, and what the compiler said."""
    nvrtc = load()
    options = (*variant.options, f"-I{cuda_headers()}", *more)
    program = ctypes.c_void_p()
    made = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), variant.code.encode(), b"kernels.cu", 0, None, None
    )
    assert made == 0
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    text = log.value.decode()
    assert failed == 0, f"{variant} {more}: {text[:3000]}"
    return program, text


def _resources(text: str) -> Resources:
    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        return int(found[1]) if found else 0

    return Resources(
        registers=number(r"Used (\d+) registers"),
        spill=number(r"(\d+) bytes spill stores"),
        shared=number(r"(\d+) bytes smem"),
    )
