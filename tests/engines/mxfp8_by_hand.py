"""mla_kv_rope with MXFP8 as exact arithmetic on bits: Python integers and fractions, no float.

Written from the description of TransformerEngine's kernel, and from nothing of this package.
"""

from fractions import Fraction
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    exponent_bits: int
    mantissa_bits: int

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1


BF16, F32 = Format(8, 7), Format(8, 23)
NAN, INF = "nan", "inf"
# A number is (is negative, magnitude), the magnitude a Fraction, INF or NAN.
Number = tuple[bool, Fraction | str]


@cache
def decode(bits: int, f: Format) -> Number:
    sign = bool(bits >> (f.exponent_bits + f.mantissa_bits))
    exponent = bits >> f.mantissa_bits & (2**f.exponent_bits - 1)
    mantissa = bits & (2**f.mantissa_bits - 1)
    if exponent == 2**f.exponent_bits - 1:
        return sign, NAN if mantissa else INF
    if exponent:
        mantissa += 2**f.mantissa_bits
    power = max(exponent, 1) - f.bias - f.mantissa_bits
    return sign, mantissa * Fraction(2) ** power


def floor_log2(x: Fraction) -> int:
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def nearest(x: Fraction, step: Fraction) -> Fraction:
    """The multiple of ``step`` next to x, the even one of two. Python rounds halves to even."""
    return round(x / step) * step


def rounded(x: Number, f: Format) -> Number:
    sign, size = x
    if isinstance(size, str) or size == 0:
        return x
    e = max(floor_log2(size), 1 - f.bias)
    size = nearest(size, Fraction(2) ** (e - f.mantissa_bits))
    return sign, INF if size >= Fraction(2) ** (f.bias + 1) else size


def times(x: Number, y: Number) -> Number:
    sign = x[0] != y[0]
    sizes = (x[1], y[1])
    if NAN in sizes or (INF in sizes and 0 in sizes):
        return sign, NAN
    if INF in sizes:
        return sign, INF
    return sign, x[1] * y[1]


def plus(x: Number, y: Number) -> Number:
    if NAN in (x[1], y[1]) or (x[1] == y[1] == INF and x[0] != y[0]):
        return False, NAN
    if INF in (x[1], y[1]):
        return x if x[1] == INF else y
    total = (-x[1] if x[0] else x[1]) + (-y[1] if y[0] else y[1])
    return (total < 0 if total else x[0] and y[0]), abs(total)


def minus(x: Number) -> Number:
    return not x[0], x[1]


def bits_of(t: Tensor) -> tuple[list[int], Format]:
    kind, f = (torch.int16, BF16) if t.dtype == torch.bfloat16 else (torch.int32, F32)
    mask = 2 ** (8 * t.element_size()) - 1
    return [n & mask for n in t.contiguous().view(kind).flatten().tolist()], f


def numbers(t: Tensor) -> list[Number]:
    bits, f = bits_of(t)
    return [decode(n, f) for n in bits]


def turned(k_rope: Tensor, cos: Tensor, sin: Tensor) -> list[list[Number]]:
    """The r channels of each row of k_rope [rows, r] with tables [rows, r], rounded to bf16."""
    f = BF16 if cos.dtype == torch.bfloat16 else F32
    found: list[list[Number]] = []
    for x, c, s in zip(*(map(numbers, t) for t in (k_rope, cos, sin)), strict=True):
        half, row = len(x) // 2, []
        for i in range(half):
            x1, x2 = x[2 * i], x[2 * i + 1]
            product = rounded(times(x2, s[i]), f)
            row.append(rounded(plus(times(x1, c[i]), minus(product)), f))
        for i in range(half):
            x1, x2 = x[2 * i], x[2 * i + 1]
            product = rounded(times(x2, c[half + i]), f)
            row.append(rounded(plus(times(x1, s[half + i]), product), f))
        found.append([rounded(y, BF16) for y in row])
    return found


# 1/448 as fp32.
RECIPROCAL = rounded((False, Fraction(1, 448)), F32)


@cache
def scale_byte(amax: Fraction | str) -> int:
    if amax == INF:
        return 254
    _, limit = rounded(times((False, amax), RECIPROCAL), F32)
    if limit == 0:
        return 0
    e = floor_log2(limit)
    return max(e + (limit != Fraction(2) ** e) + 127, 0)


@cache
def e4m3_byte(x: Number, scale: int) -> int:
    sign, size = x
    top = 128 if sign else 0
    if size == NAN:
        return 0x7F
    if size == INF:
        return top | 0x7E
    size = size / Fraction(2) ** (scale - 127)
    if size == 0:
        return top
    e = max(floor_log2(size), -6)
    size = nearest(size, Fraction(2) ** (e - 3))
    if size >= 448:
        return top | 0x7E
    if size < Fraction(2) ** -6:
        return top | int(size / Fraction(2) ** -9)
    e = floor_log2(size)
    return top | (e + 7) << 3 | int((size / Fraction(2) ** e - 1) * 8)


def magnitude(block: list[Number]) -> Fraction | str:
    sizes = [size for _, size in block if size != NAN]
    return INF if INF in sizes else max(sizes, default=Fraction(0))


def quantized(rows: list[list[list[Number]]]) -> dict[str, Tensor]:
    """rows: of [h][s][d] numbers -> the four byte tensors, [h, s, d] and with blocks."""
    h, s, d = len(rows), len(rows[0]), len(rows[0][0])
    out = {
        "row": torch.zeros(h, s, d, dtype=torch.uint8),
        "row_scale": torch.zeros(h, s, d // 32, dtype=torch.uint8),
        "column": torch.zeros(h, s, d, dtype=torch.uint8),
        "column_scale": torch.zeros(h, s // 32, d, dtype=torch.uint8),
    }
    for head in range(h):
        for t in range(s):
            for block in range(d // 32):
                own = rows[head][t][32 * block : 32 * block + 32]
                byte = scale_byte(magnitude(own))
                out["row_scale"][head, t, block] = byte
                data = [e4m3_byte(x, byte) for x in own]
                out["row"][head, t, 32 * block : 32 * block + 32] = torch.tensor(data)
        for c in range(d):
            for block in range(s // 32):
                own = [rows[head][t][c] for t in range(32 * block, 32 * block + 32)]
                byte = scale_byte(magnitude(own))
                out["column_scale"][head, block, c] = byte
                data = [e4m3_byte(x, byte) for x in own]
                out["column"][head, 32 * block : 32 * block + 32, c] = torch.tensor(data)
    return out


def mla(kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, nope: int) -> dict[str, Tensor]:
    """The eight outputs, [b, h, .., ..] bytes, by port."""
    b, h, s, _ = kv.shape
    found: dict[str, list[Tensor]] = {}
    for i in range(b):
        shared = turned(k_rope[i, 0], cos[:s, 0, 0], sin[:s, 0, 0])
        heads = [[numbers(kv[i, j, t]) for t in range(s)] for j in range(h)]
        keys = [[heads[j][t][:nope] + shared[t] for t in range(s)] for j in range(h)]
        values = [[heads[j][t][nope:] for t in range(s)] for j in range(h)]
        for side, rows in (("key", keys), ("value", values)):
            for form, data in quantized(rows).items():
                found.setdefault(f"{side}_{form}", []).append(data)
    return {port: torch.stack(parts) for port, parts in found.items()}
