"""A step and a device as the rules read them: sizes, flags and versions, found once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from ropegraph.ir.graph import Value
from ropegraph.ir.ops import Attention, Sdpa, SdpaBackward
from ropegraph.lowering.engine import Device, Step

# The tensors that the kernels read and write in 16-byte pieces.
OPERANDS = ("q", "k", "v", "o", "dO", "O", "dQ", "dK", "dV")
# The tensors of one number, which may also be passed by value.
SCALARS = ("attn_scale", "seed", "offset")


def version_name(number: int) -> str:
    """91801 -> 9.18.1, as cuDNN numbers its releases."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


@dataclass(frozen=True)
class Facts:
    """What a rule may ask about."""

    step: Step
    device: Device

    @property
    def attrs(self) -> Attention:
        return cast(Attention, self.step.node.attrs)

    @property
    def is_backward(self) -> bool:
        return isinstance(self.attrs, SdpaBackward)

    @property
    def is_deterministic(self) -> bool:
        return isinstance(self.attrs, SdpaBackward) and self.attrs.deterministic

    def has(self, port: str) -> bool:
        return self.step.has(port)

    def value(self, port: str) -> Value:
        return self.step.value(port)

    def present(self, ports: tuple[str, ...]) -> tuple[tuple[str, Value], ...]:
        """Those of ``ports`` that the step uses, with their values."""
        return tuple((port, self.value(port)) for port in ports if self.has(port))

    # Sizes.

    @property
    def b(self) -> int:
        return self.value("q").dim[0]

    @property
    def heads(self) -> tuple[int, int, int]:
        """h_q, h_k, h_v."""
        q, k, v = (self.value(port).dim[1] for port in ("q", "k", "v"))
        return q, k, v

    @property
    def s_q(self) -> int:
        return self.value("q").dim[2]

    @property
    def s_kv(self) -> int:
        if isinstance(self.attrs, Sdpa) and self.attrs.max_seq_len_kv is not None:
            return self.attrs.max_seq_len_kv
        return self.value("k").dim[2]

    @property
    def d_qk(self) -> int:
        return self.value("q").dim[3]

    @property
    def d_v(self) -> int:
        return self.value("v").dim[3]

    # Features.

    @property
    def is_paged(self) -> bool:
        return isinstance(self.attrs, Sdpa) and self.attrs.max_seq_len_kv is not None

    @property
    def is_ragged(self) -> bool:
        return any(value.ragged_offset is not None for _, value in self.present(OPERANDS))

    @property
    def is_sequential(self) -> bool:
        """True where sequences end before their tensors do: padded, ragged or both."""
        return self.attrs.padding or self.is_ragged

    @property
    def has_ragged_units(self) -> bool:
        return any(
            value.ragged_offset is not None and value.ragged_multiplier != 1
            for _, value in self.present((*OPERANDS, "stats", "Stats"))
        )

    @property
    def has_dropout(self) -> bool:
        return bool(self.attrs.dropout_p)

    @property
    def is_causal_bottom_right(self) -> bool:
        """A right bound on the diagonal that ends in the last key: what cuDNN restricts most."""
        return self.attrs.bottom_right and self.attrs.right_bound is not None

    # Where it runs.

    @property
    def major(self) -> int:
        """The first figure of the compute capability; 0 where there is no GPU."""
        return self.device.sm // 10

    def before(self, version: int) -> bool:
        """True for a cuDNN that is older; False where there is none, which is a rule of its own."""
        return 0 < self.device.cudnn < version

    def since(self, version: int) -> bool:
        return self.device.cudnn >= version

    @property
    def cudnn_name(self) -> str:
        return f"cuDNN {version_name(self.device.cudnn)}"
