"""One table of data types: their names in cuDNN Frontend, torch and CUDA C."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from ropegraph.errors import GraphError

if TYPE_CHECKING:
    import torch


class DType(Enum):
    """A data type, spelled as in cuDNN Frontend: (torch name, CUDA C name, bytes)."""

    NOT_SET = ("", "", 0)
    HALF = ("float16", "__half", 2)
    BFLOAT16 = ("bfloat16", "__nv_bfloat16", 2)
    FLOAT = ("float32", "float", 4)
    DOUBLE = ("float64", "double", 8)
    FP8_E4M3 = ("float8_e4m3fn", "__nv_fp8_e4m3", 1)
    FP8_E5M2 = ("float8_e5m2", "__nv_fp8_e5m2", 1)
    FP8_E8M0 = ("float8_e8m0fnu", "__nv_fp8_e8m0", 1)
    INT8 = ("int8", "signed char", 1)
    UINT8 = ("uint8", "unsigned char", 1)
    INT32 = ("int32", "int", 4)
    INT64 = ("int64", "long long", 8)
    BOOLEAN = ("bool", "bool", 1)

    @property
    def torch_name(self) -> str:
        return self.value[0]

    @property
    def c_name(self) -> str:
        return self.value[1]

    @property
    def itemsize(self) -> int:
        return self.value[2]

    @property
    def is_float(self) -> bool:
        return self in FLOATS

    def __repr__(self) -> str:
        return f"data_type.{self.name}"


FLOATS = (DType.HALF, DType.BFLOAT16, DType.FLOAT, DType.DOUBLE)
INDEX = (DType.INT32, DType.INT64)

_SHORT = {
    DType.HALF: "fp16",
    DType.BFLOAT16: "bf16",
    DType.FLOAT: "fp32",
    DType.DOUBLE: "fp64",
}


def _words(dtype: DType) -> tuple[str, ...]:
    """fp32 and f32, for floating types."""
    word = _SHORT.get(dtype, "")
    return word, word.replace("fp", "f")


_BY_NAME = {
    name: dtype
    for dtype in DType
    for name in (dtype.name, dtype.name.lower(), dtype.torch_name, *_words(dtype))
    if name
}


def short(dtype: DType) -> str:
    """The name used in messages and printed graphs: bf16, fp32, int32."""
    return _SHORT.get(dtype, dtype.name.lower())


def as_dtype(given: object, argument: str = "data_type") -> DType:
    """Read a data type given as DType, torch.dtype, cudnn.data_type or a name.

    None means NOT_SET. Raises GraphError for anything else.
    """
    if given is None:
        return DType.NOT_SET
    if isinstance(given, DType):
        return given
    # torch.float16 prints as 'torch.float16', cudnn.data_type.HALF has .name: no import needed.
    text = str(getattr(given, "name", given)).rsplit(".", 1)[-1]
    if text in _BY_NAME:
        return _BY_NAME[text]
    raise GraphError(
        f"{argument}={given!r} is not a data type; use a torch dtype such as torch.bfloat16, its "
        f"name, or one of {', '.join('data_type.' + d.name for d in DType)}"
    )


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch type of that name."""
    import torch

    return getattr(torch, dtype.torch_name)


def as_compute(given: object, argument: str = "compute_data_type") -> DType:
    """Read the type to compute in: fp32 at least.  Raises GraphError for what holds no fraction."""
    dtype = as_dtype(given, argument)
    if dtype is not DType.NOT_SET and dtype not in FLOATS:
        raise GraphError(
            f"{argument}={dtype!r}; use {', '.join(f'data_type.{d.name}' for d in FLOATS)}"
        )
    return wider(dtype)


def wider(*dtypes: DType) -> DType:
    """The widest floating type among ``dtypes`` as an accumulator: fp32, or fp64 if any is."""
    return DType.DOUBLE if DType.DOUBLE in dtypes else DType.FLOAT
