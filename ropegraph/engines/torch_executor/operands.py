"""What an sdpa step reads beside q, k and v: resolved to slots once, to tensors at each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from ropegraph.dtypes import torch_dtype, wider
from ropegraph.engines.torch_executor.band import band_of
from ropegraph.engines.torch_executor.dropout import Dropout, Word
from ropegraph.engines.torch_executor.flash import Flash, Scale, flash_for, rough_ports
from ropegraph.engines.torch_executor.logits import LN_2, Logits, alibi_slopes
from ropegraph.engines.torch_executor.problem import Shape
from ropegraph.engines.torch_executor.score_program import ScoreMod
from ropegraph.ir.ops import Attention, Sdpa
from ropegraph.lowering.engine import Step

Env = Sequence[Any]


def compute_dtype(step: Step) -> torch.dtype:
    """fp32, or fp64 where the node asks for it or a tensor is fp64."""
    attrs = cast(Attention, step.node.attrs)
    dtypes = [step.value(port).dtype for port in ("q", "k", "v")]
    return torch_dtype(wider(*dtypes, attrs.compute))


def shape_of(step: Step) -> Shape:
    """The sizes of the whole step; paged k and v count as max_seq_len_kv rows."""
    attrs = step.node.attrs
    q, k, v = (step.value(port).dim for port in ("q", "k", "v"))
    s_kv = k[2]
    if isinstance(attrs, Sdpa) and attrs.max_seq_len_kv is not None:
        s_kv = attrs.max_seq_len_kv
    return Shape(q[0], q[1], k[1], v[1], q[2], s_kv)


def scale_reader(step: Step) -> Callable[[Env], Scale]:
    """The natural factor of q.k: attn_scale, times ln 2 where the softmax input is log2."""
    attrs = cast(Attention, step.node.attrs)
    unit = LN_2 if attrs.softmax_input_is_log2 else 1.0
    if attrs.attn_scale is not None:
        fixed = attrs.attn_scale * unit
        return lambda _: fixed
    slot = step.slot("attn_scale")

    def read(env: Env) -> Scale:
        given = env[slot]
        # On a device it stays there: reading it would wait for the stream.
        if isinstance(given, torch.Tensor) and not given.is_cpu:
            return given.reshape(()).to(torch.float64) * unit
        return float(given) * unit

    return read


@dataclass(frozen=True)
class Part:
    """The piece of a step that is one problem: batches [b0, b1), all of these lengths."""

    b0: int
    b1: int
    s_q: int
    s_kv: int

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """The part of a tensor with axes [b, h, s_q, s_kv], of length 1 where it repeats."""
        b = slice(self.b0, self.b1) if x.shape[0] > 1 else slice(None)
        rows = slice(self.s_q) if x.shape[2] > 1 else slice(None)
        columns = slice(self.s_kv) if x.shape[3] > 1 else slice(None)
        return x[b, :, rows, columns]

    def shape(self, whole: Shape) -> Shape:
        return replace(whole, b=self.b1 - self.b0, s_q=self.s_q, s_kv=self.s_kv)


class Operands:
    """The optional inputs of a step, as the problems of one call see them."""

    def __init__(self, step: Step) -> None:
        attrs = cast(Attention, step.node.attrs)
        self.attrs = attrs
        self.shape = shape_of(step)
        self.compute = compute_dtype(step)
        self.scale = scale_reader(step)
        self._d_qk, self._d_v = step.value("q").dim[3], step.value("v").dim[3]
        self._rough = rough_ports(step, self.compute)
        self._bias = step.slot("bias")
        self._sink = step.slot("sink_token")
        self._seed, self._offset = step.slot("seed"), step.slot("offset")
        program = attrs.score_mod
        self._ports = {} if program is None else {p: step.slot(p) for p in program.ports}

    def flash(self, part: Part) -> Flash | None:
        """torch's fused kernel, if it can serve this part."""
        attrs = self.attrs
        extra = self._bias >= 0 or self._sink >= 0 or attrs.alibi or bool(attrs.dropout_p)
        if extra or attrs.score_mod is not None:
            return None
        band = band_of(attrs, part.s_q, part.s_kv)
        shape = part.shape(self.shape)
        return flash_for(shape, self._d_qk, self._d_v, band, self.compute, self._rough)

    def logits(self, env: Env, scale: Scale, part: Part) -> Logits:
        attrs, shape = self.attrs, self.shape
        score_mod = bias = None
        if attrs.score_mod is not None:
            ports = {p: self._full(env[slot], part) for p, slot in self._ports.items()}
            score_mod = ScoreMod(attrs.score_mod, ports, part.b0)
        if self._bias >= 0:
            bias = self._full(env[self._bias], part)
        slopes = alibi_slopes(shape.h_q) if attrs.alibi else ()
        return Logits(scale, band_of(attrs, part.s_q, part.s_kv), score_mod, bias, slopes)

    def _full(self, x: torch.Tensor, part: Part) -> torch.Tensor:
        """``x``, which broadcasts to [b, h_q, s_q, s_kv], expanded and cut to a part."""
        shape = self.shape
        x = x[(None,) * (4 - x.dim())] if x.dim() < 4 else x
        return part.cut(x).expand(part.b1 - part.b0, shape.h_q, part.s_q, part.s_kv)

    def sink(self, env: Env) -> torch.Tensor | None:
        """[h_q] in the compute dtype."""
        return None if self._sink < 0 else env[self._sink].reshape(-1).to(self.compute)

    def dropout(self, env: Env, part: Part) -> Dropout | None:
        p = self.attrs.dropout_p
        if p is None or p == 0.0:
            return None
        seed, offset = _word(env[self._seed]), _word(env[self._offset])
        return Dropout(p, seed, offset, self.shape.h_q, part.b0)


def _word(given: Any) -> Word:
    if isinstance(given, torch.Tensor):
        return int(given) if given.is_cpu else given.reshape(()).to(torch.int64)
    return int(given)
