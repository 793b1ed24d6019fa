"""The recording methods of qkv_rope and qkv_rope_backward: rotations of packed QKV."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ropegraph.api.angle_source import SOURCE_KEYWORDS
from ropegraph.api.checks import as_count, as_flag, as_list, as_name
from ropegraph.api.meant import meant_by
from ropegraph.api.recording import Recorder
from ropegraph.api.rope_ops import RopeOps
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError
from ropegraph.ir.ops import JoinQkv, SplitQkv
from ropegraph.ir.packed import PARTS, parts_of, view_of


class QkvOps(RopeOps):
    """Part of pygraph: packed QKV."""

    recorder: Recorder

    def qkv_rope(
        self,
        qkv: Any,
        freqs: Any = None,
        *,
        split: Iterable[int],
        by_groups: bool | None = None,
        q_output_scale: float = 1.0,
        k_output_scale: float = 1.0,
        in_place: bool = False,
        name: str = "",
        **rope: Any,
    ) -> list[Tensor]:
        """Rotate Q and K of a packed tensor in one launch: returns [Q, K, V], each [b, h, s, d].

        qkv: [b, s, h_q + h_k + h_v, d] with split=[h_q, h_k, h_v], or by groups (TransformerEngine)
        [b, s, groups, (n + 2) d] with split=[n d, d, d]: each group has n heads of Q, one of K and
        one of V; head i of group g is head g n + i of Q. Strides say whether s or b comes first.
        [b, s, (h_q + h_k + h_v) d], as a projection gives it, is heads side by side.
        by_groups: which of the two; found from ``split`` if left out, where only one fits.
        freqs and rope: as for rope(); k_freqs, k_cos, k_sin, k_cos_sin, k_inv_freq: the table of K,
        where it differs from that of Q.  k_cache, k_cache_positions: K is written into a cache; V
        goes into its own by cache_write, in the same launch.
        V is a view of qkv, never copied, unless set_output(True) gives it a buffer of its own.
        in_place: Q and K are written over qkv, whose buffer then holds the rotated heads.
        Raises GraphError if split does not fit, or as rope() does.
        """
        name = self._qkv_name(SplitQkv, name, "qkv_rope")
        where = f"qkv_rope {name!r}"
        _refuse_own(where, rope)
        wanted = as_flag(in_place, f"{where}: in_place")
        with self.recorder.all_or_none():
            made = dict(self._split(qkv, where, f"{name}_split", split, by_groups))
            for part, scale in (("q", q_output_scale), ("k", k_output_scale)):
                x = made[part]
                groups = x.get_dim()[1] if len(x.get_dim()) == 5 and not wanted else 0
                made[part] = self.rope(
                    x, name=f"{name}_{part}", output_scale=scale, head_groups=groups,
                    **_keywords(part, {"freqs": freqs, **rope}),
                )  # fmt: skip
                if wanted and made[part].spec.in_place_of is not None:
                    raise GraphError(
                        f"{where}: in_place and k_cache both say where K goes; use one"
                    )
                if wanted:
                    made[part].spec.in_place_of = x
        return [made[part].set_name(f"{name}::{part.upper()}") for part in PARTS]

    def split_qkv(
        self, qkv: Any, *, split: Iterable[int], by_groups: bool | None = None, name: str = ""
    ) -> list[Tensor]:
        """Q, K and V of a packed tensor as qkv_rope takes it, unrotated: views, never copied."""
        name = self._qkv_name(SplitQkv, name, "split_qkv")
        where = f"split_qkv {name!r}"
        return list(self._split(qkv, where, name, split, by_groups).values())

    def _split(
        self, qkv: Any, where: str, name: str, split: Iterable[int], by_groups: bool | None
    ) -> dict[str, Tensor]:
        packed = self.recorder.adopt(qkv, f"{where}: qkv")
        dim, stride = tuple(packed.get_dim()), tuple(packed.get_stride())
        attrs = _attrs(where, split, by_groups, list(dim))
        made = self.recorder.record(attrs, name, {"qkv": packed}, PARTS)
        for part, tensor in made.items():
            tensor.set_stride(view_of(attrs, part, dim, stride).stride)
        return made

    def qkv_rope_backward(
        self,
        dQ: Any,
        dK: Any,
        dV: Any,
        freqs: Any = None,
        *,
        split: Iterable[int],
        by_groups: bool | None = None,
        q_output_scale: float = 1.0,
        k_output_scale: float = 1.0,
        name: str = "",
        **rope: Any,
    ) -> Tensor:
        """The adjoint of qkv_rope: dQKV, packed as qkv is, from dQ, dK and dV, each [b, h, s, d].

        What makes dV, and the one launch that makes dQ and dK, write into dQKV where they can.
        """
        name = self._qkv_name(JoinQkv, name, "qkv_rope_backward")
        where = f"qkv_rope_backward {name!r}"
        _refuse_own(where, rope)
        grads = {
            part: self.recorder.adopt(given, f"{where}: d{part.upper()}")
            for part, given in zip(PARTS, (dQ, dK, dV), strict=True)
        }
        dims = {part: grad.get_dim() for part, grad in grads.items()}
        attrs = _joined(where, split, by_groups, dims)
        with self.recorder.all_or_none():
            for part, scale in (("q", q_output_scale), ("k", k_output_scale)):
                dim = parts_of(where, attrs, attrs.dim)[part]
                grads[part] = self.rope_backward(
                    grads[part], name=f"{name}_{part}", output_scale=scale,
                    head_groups=dim[1] if len(dim) == 5 else 0,
                    **_keywords(part, {"freqs": freqs, **rope}),
                )  # fmt: skip
            return self.recorder.record(attrs, f"{name}_join", grads, ("qkv",))["qkv"]

    def _qkv_name(self, kind: type[SplitQkv] | type[JoinQkv], given: str, word: str) -> str:
        """The caller's name, or ``<word>.<n>``."""
        if found := as_name(given, f"{word}: name"):
            return found
        count = sum(isinstance(n.attrs, kind) for n in self.recorder.nodes)
        return f"{word}.{count}"


def _refuse_own(where: str, given: Iterable[str]) -> None:
    """Raise GraphError for a keyword of rope that is set here, for Q and for K."""
    for keyword in given:
        if keyword.removeprefix("k_") in ("input", "dY", "name", "output_scale", "head_groups"):
            hint = meant_by(keyword, ("q_output_scale", "k_output_scale"))
            raise GraphError(f"{where}: {keyword}= is no argument here{hint}")


def _keywords(part: str, given: dict[str, Any]) -> dict[str, Any]:
    """The keywords of rope for Q or for K: those that begin with k_ are K's own."""
    own = {n.removeprefix("k_"): v for n, v in given.items() if n.startswith("k_")}
    shared = {n: v for n, v in given.items() if not n.startswith("k_")}
    if part == "q" or not own:
        return shared
    if any(n in own for n in SOURCE_KEYWORDS):
        # One source of angles: what K has of its own takes the place of all of Q's.
        shared = {n: v for n, v in shared.items() if n not in SOURCE_KEYWORDS}
    return shared | own


def _attrs(where: str, given: Iterable[int], by_groups: bool | None, dim: list[int]) -> SplitQkv:
    """Which of the two layouts.  Raises GraphError if none fits, or both do and none is named."""
    split = [as_count(n, f"{where}: split") for n in as_list(given, f"{where}: split")]
    if len(split) != 3:
        raise GraphError(f"{where}: split={split}; use three numbers, for q, k and v")
    q, k, v = split
    if by_groups is not None:
        return SplitQkv((q, k, v), as_flag(by_groups, f"{where}: by_groups"))
    fits = [len(dim) == 4 and sum(split) == dim[axis] for axis in (2, 3)]
    if all(fits):
        raise GraphError(
            f"{where}: split={split} fits both the heads and the width of qkv {dim}; say "
            "by_groups=True or False"
        )
    return SplitQkv((q, k, v), by_groups=fits[1])


def _joined(
    where: str, given: Iterable[int], by_groups: bool | None, dims: dict[str, list[int]]
) -> JoinQkv:
    """The attributes of a join of gradients of these dims, each [b, h, s, d]."""
    for part, dim in dims.items():
        if len(dim) != 4:
            raise GraphError(f"{where}: d{part.upper()} is {dim}; use [b, h, s, d]")
    b, h_q, s, d = dims["q"]
    heads = [dims[part][1] for part in PARTS]
    plain = [b, s, sum(heads), d]
    groups = [b, s, heads[1], d * (h_q // max(heads[1], 1) + 2)]
    if by_groups is None:
        by_groups = list(as_list(given, f"{where}: split")) != heads
    whole = groups if by_groups else plain
    attrs = _attrs(where, given, by_groups, whole)
    return JoinQkv(attrs.split, attrs.by_groups, tuple(whole))
