"""The angles of a rope type as a module, which nothing that happens to a model can spoil."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ropegraph import angles
from ropegraph.angles.checks import Device, as_length
from ropegraph.angles.dynamic import stretched
from ropegraph.angles.parameters import Resolved, resolve
from ropegraph.api.checks import as_list
from ropegraph.errors import GraphError

Rope = dict[str, Any]
"""Keywords of functional.attention that say how to rotate."""


class RotaryAngles(nn.Module):
    """Inverse frequencies of a rope type; a call gives the keywords that the functions take.

        angles = RotaryAngles({"rope_type": "yarn", "factor": 4.0, ...}, head_dim=128)
        o = attention(q, k, v, **angles(), is_causal=True)

    rope_parameters: a dictionary as in Hugging Face configurations, or a configuration that has
    one; None is the default type. The other arguments are those of ``ropegraph.angles.inv_freq``.
    interleaved: pairs (2i, 2i + 1) instead of (i, i + r/2).  angle_precision: as for rope.
    device: where the frequencies lie; None is torch's default.

    The frequencies follow the module from device to device, and are f32 in any mode: ``half()``,
    ``to(torch.bfloat16)``, autocast and torch's default type leave their bits alone, and they are
    the same on every device. They are no part of the state_dict. A module that was made on the meta
    device has them as soon as it is moved, or called with a device. Copies and pickles are whole.
    Raises GraphError as ``inv_freq`` does.
    """

    inv_freq: Tensor
    axes: Tensor | None

    def __init__(
        self,
        rope_parameters: object = None,
        *,
        head_dim: int | None = None,
        max_position_embeddings: int | None = None,
        layer_type: str | None = None,
        ignore_keys: Iterable[str] = (),
        interleaved: bool = False,
        angle_precision: str = "float32",
        device: Device = None,
    ) -> None:
        super().__init__()
        self._rope = resolve(
            {} if rope_parameters is None else rope_parameters,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            layer_type=layer_type,
            ignore_keys=as_list(ignore_keys, "RotaryAngles: ignore_keys"),
        )
        self.interleaved = interleaved
        self.angle_precision = angle_precision
        with torch.inference_mode(mode=False):
            self._host = _on_host(self._rope)
        # True if the frequencies depend on the length of the sequence: dynamic and longrope.
        self.reads_length: bool = self._rope.reads_length
        self._stretch = _stretch(self._rope)
        self.rope_dim = 2 * self._host.inv_freq.shape[-1]
        self._place(torch.get_default_device() if device is None else torch.device(device))

    @property
    def head_dim(self) -> int:
        """Channels of a head, of which the first ``rope_dim`` turn."""
        return self._rope.parameters["head_dim"]

    @property
    def attention_factor(self) -> float:
        """What the rotated channels are multiplied by."""
        return self._host.attention_factor

    def forward(
        self,
        position_ids: Tensor | None = None,
        *,
        seq_len: int | Tensor | None = None,
        device: torch.device | None = None,
    ) -> Rope:
        """The rotation, as keywords of rope, attention, qkv_attention and cached_attention.

        position_ids: [b or 1, s] of rows that are not 0, 1, 2, ...; for several axes [axes, s] or
        [axes, b, s], which M-RoPE takes as text if they are left out.
        seq_len: what dynamic and longrope depend on; position_ids.max() + 1 if left out. As a
        tensor, and as that, it is not read on the host. Nothing is remembered from call to call.
        device: of the tensors that will be rotated, if the module may lie elsewhere.
        Raises GraphError if positions or a length are missing.
        """
        if position_ids is not None and not isinstance(position_ids, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(
                f"RotaryAngles: position_ids is {type(position_ids).__name__}; use a tensor"
            )
        rope: Rope = {
            "rope_dim": self.rope_dim, "rope_offset": 0, "interleaved": self.interleaved,
            "attention_factor": self._host.attention_factor,
        }  # fmt: skip
        self._see_to(device)
        table = self._at(position_ids, seq_len) if self.reads_length else self.inv_freq
        if self.axes is None or (position_ids is None and self._host.axis_count == 3):
            rope |= {"inv_freq": table, "angle_precision": self.angle_precision}
            return rope if position_ids is None else rope | {"position_ids": position_ids}
        if position_ids is None:
            raise GraphError(
                f"RotaryAngles: rope_type {self._rope.rope_type!r} turns by several positions a "
                f"token; give position_ids, [{self._host.axis_count}, s]"
            )
        found = replace(self._host, inv_freq=table, axes=self.axes)
        return rope | {
            "freqs": angles.freqs(found, position_ids, width="half"), "half_width": True
        }  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self._rope.rope_type!r}, head_dim={self.head_dim}, rope_dim={self.rope_dim}"

    def _at(self, position_ids: Tensor | None, seq_len: int | Tensor | None) -> Tensor:
        """[r/2]: the frequencies for this length."""
        if seq_len is None:
            if position_ids is None:
                raise GraphError(
                    f"RotaryAngles: frequencies of rope_type {self._rope.rope_type!r} depend on "
                    "the length; give seq_len=, or position_ids="
                )
            seq_len = position_ids.max() + 1
        if not torch.compiler.is_compiling():
            seq_len, _ = as_length("RotaryAngles", seq_len, None)
        elif not isinstance(seq_len, Tensor):
            # A number would be a constant of what is compiled.
            seq_len = torch.full((), seq_len, device=self.inv_freq.device)
        if self._stretch is None:
            is_long = seq_len > self._rope.parameters["original_max_position_embeddings"]
            if isinstance(is_long, Tensor):
                return torch.where(is_long.reshape(()), self.inv_freq[1], self.inv_freq[0])
            return self.inv_freq[1 if is_long else 0]
        device, dtype = self.inv_freq.device, torch.float32
        return stretched(seq_len, self.rope_dim, *self._stretch, device=device, dtype=dtype)

    def _place(self, device: torch.device) -> None:
        # A tensor made in that mode could not be kept for a backward.
        with torch.inference_mode(mode=False):
            for name in ("inv_freq", "axes"):
                table = getattr(self._host, name)
                placed = None if table is None else table.to(device)
                self.register_buffer(name, placed, persistent=False)

    def _see_to(self, device: torch.device | None) -> None:
        """Mend what was done to the buffers past this module."""
        table = self.inv_freq
        if table.dtype is not torch.float32 or (device is not None and table.device != device):
            self._place(table.device if device is None else device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryAngles:
        """What to(), half(), to_empty() and the like do: followed to the device, and no further."""
        old = self.inv_freq.device
        new = fn(torch.empty(0, device="cpu" if old.type == "meta" else old)).device
        if new != old:
            self._place(new)
        return self


def _stretch(rope: Resolved) -> tuple[float, float, int] | None:
    """The numbers of dynamic NTK scaling, which are checked when the frequencies are made."""
    if rope.rope_type != "dynamic":
        return None
    given = rope.parameters
    return (
        float(given.get("rope_theta", 10_000.0)), float(given["factor"]),
        int(given["max_position_embeddings"]),
    )  # fmt: skip


def _on_host(rope: Resolved) -> angles.RopeAngles:
    """The frequencies in f32 on the CPU; of longrope [2, r/2], for short sequences and long."""
    short = rope(device="cpu")
    if rope.rope_type != "longrope":
        return short
    length = int(rope.parameters["original_max_position_embeddings"]) + 1
    return replace(
        short, inv_freq=torch.stack((short.inv_freq, rope(seq_len=length, device="cpu").inv_freq))
    )
