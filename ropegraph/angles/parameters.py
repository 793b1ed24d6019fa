"""One entry for every rope type: from ``rope_parameters`` to inverse frequencies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from ropegraph.angles.axial import axial
from ropegraph.angles.checks import Device
from ropegraph.angles.config import Given, read
from ropegraph.angles.default import default
from ropegraph.angles.dynamic import dynamic
from ropegraph.angles.linear import linear
from ropegraph.angles.llama3 import llama3
from ropegraph.angles.longrope import longrope
from ropegraph.angles.mrope import mrope
from ropegraph.angles.proportional import proportional
from ropegraph.angles.result import RopeAngles
from ropegraph.angles.yarn import yarn
from ropegraph.errors import GraphError

Maker = Callable[..., RopeAngles]

ROPE_TYPES: dict[str, Maker] = {
    "default": default,
    "linear": linear,
    "dynamic": dynamic,
    "yarn": yarn,
    "longrope": longrope,
    "llama3": llama3,
    "proportional": proportional,
    "axial": axial,
}
# Keywords of the types that are no rope parameters, but come from the model or the call.
_FROM_THE_CALL = {"head_dim", "max_position_embeddings", "seq_len", "device", "dtype"}


def inv_freq(
    rope_parameters: object,
    *,
    head_dim: int | None = None,
    max_position_embeddings: int | None = None,
    seq_len: int | Tensor | None = None,
    layer_type: str | None = None,
    ignore_keys: Iterable[str] = (),
    device: Device = None,
    dtype: torch.dtype = torch.float32,
) -> RopeAngles:
    """Inverse frequencies from a Hugging Face ``rope_parameters`` dictionary, or from a config that
    has one.

    rope_parameters: rope_type ("default" if absent), its parameters by the keywords of the function
    of that name in ``ropegraph.angles``, and mrope_section with mrope_interleaved for M-RoPE. A
    parameter that is None counts as absent. Where it is nested by layer type, layer_type says which
    to take. A config also gives head_dim, max_position_embeddings, rope_theta,
    partial_rotary_factor, original_max_position_embeddings and keys to ignore, as transformers
    reads them; a keyword of the call comes first.
    head_dim: channels of a head, or of the part of it that is rotated in multi-head latent
    attention. max_position_embeddings, seq_len: for the types that read them; see there.
    ignore_keys: keys of the model's own that mean nothing to the angles.
    Returns inv_freq [r/2] in ``dtype`` (f32 or f64) on ``device``, and attention_factor.
    Raises GraphError for a missing or unknown key and for values that the type refuses.
    Source: transformers 5, ``ROPE_INIT_FUNCTIONS``.
    """
    return resolve(
        rope_parameters,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        layer_type=layer_type,
        ignore_keys=ignore_keys,
    )(seq_len=seq_len, device=device, dtype=dtype)


@dataclass(frozen=True)
class Resolved:
    """A rope type with its parameters read and checked; called, it makes the frequencies.

    parameters: keywords of the function of that name in ``ropegraph.angles``.
    section, is_interleaved: of M-RoPE, None where there is one axis.
    """

    rope_type: str
    parameters: Mapping[str, Any]
    section: Any = None
    is_interleaved: bool = False

    @property
    def reads_length(self) -> bool:
        """True if the frequencies depend on how long the sequence is."""
        return "seq_len" in inspect.signature(ROPE_TYPES[self.rope_type]).parameters

    def __call__(
        self,
        *,
        seq_len: int | Tensor | None = None,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
    ) -> RopeAngles:
        """The frequencies; seq_len is ignored by the types that do not read it."""
        length = {"seq_len": seq_len} if self.reads_length else {}
        made = ROPE_TYPES[self.rope_type](**self.parameters, **length, device=device, dtype=dtype)
        if self.section is None:
            return made
        return mrope(made, self.section, mrope_interleaved=self.is_interleaved)


def resolve(
    rope_parameters: object,
    *,
    head_dim: int | None = None,
    max_position_embeddings: int | None = None,
    layer_type: str | None = None,
    ignore_keys: Iterable[str] = (),
) -> Resolved:
    """Read the parameters as ``inv_freq`` does, for frequencies that are made later."""
    given = read(rope_parameters, layer_type)
    make = ROPE_TYPES.get(given.rope_type)
    if make is None:
        raise GraphError(
            f"inv_freq: rope_type={given.rope_type!r:.60} is not known; "
            f"use one of {', '.join(ROPE_TYPES)}"
        )
    keys = inspect.signature(make).parameters
    keywords = {k: v for k, v in given.parameters.items() if k in keys}
    section = given.parameters.get("mrope_section")
    interleaved = given.parameters.get("mrope_interleaved", False)
    _refuse_unknown(given, keys, set(ignore_keys) | given.ignore_keys)
    if section is None and interleaved:
        raise GraphError(
            "inv_freq: mrope_interleaved without mrope_section; give both, "
            "for example mrope_section=[24, 20, 20]"
        )
    heads = given.head_dim if head_dim is None else head_dim
    if heads is None:
        raise GraphError("inv_freq: rope_parameters does not tell head_dim; give head_dim=128, say")
    keywords["head_dim"] = heads
    if "max_position_embeddings" in keys:
        length = max_position_embeddings
        if length is None:
            length = given.max_position_embeddings
        if length is not None:
            keywords["max_position_embeddings"] = length
    _refuse_missing(given, make, keywords)
    return Resolved(given.rope_type, keywords, section, interleaved)


def _refuse_unknown(given: Given, keys: Iterable[str], ignored: set[str]) -> None:
    known = {*keys, "mrope_section", "mrope_interleaved"} - _FROM_THE_CALL
    if "max_position_embeddings" in keys:
        known.add("max_position_embeddings")
    for key, value in given.parameters.items():
        if key in known or key in ignored:
            continue
        near = get_close_matches(str(key), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it reads {', '.join(sorted(known))}"
        raise GraphError(
            f"inv_freq: {key}={value!r:.60} means nothing to rope_type {given.rope_type!r}; {hint} "
            "(ignore_keys= names keys to leave out)"
        )


def _refuse_missing(given: Given, make: Maker, keywords: dict[str, Any]) -> None:
    parameters = inspect.signature(make).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    if missing := [name for name in required if name not in keywords]:
        raise GraphError(
            f"inv_freq: {', '.join(missing)} missing; rope_type {given.rope_type!r} needs "
            f"{', '.join(required)}"
        )
