"""The demo's graphs: rotate Q and K, attend, and the gradient graph of that, under one fold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import ropegraph as rg


@dataclass(frozen=True)
class Setting:
    """A row of the fold table."""

    name: str
    fold: str
    fold_log2: bool = False


SETTINGS = (
    Setting("off", "off"),
    Setting("q", "q"),
    Setting("symmetric", "symmetric"),
    Setting("q + log2", "q", fold_log2=True),
    Setting("symmetric + log2", "symmetric", fold_log2=True),
)


@dataclass(frozen=True)
class Sizes:
    """Grouped-query causal attention; the last ``rotated`` channels of a head turn."""

    b: int
    h_q: int
    h_kv: int
    s: int
    d: int
    rotated: int

    @property
    def q_dim(self) -> tuple[int, int, int, int]:
        return self.b, self.h_q, self.s, self.d

    @property
    def kv_dim(self) -> tuple[int, int, int, int]:
        return self.b, self.h_kv, self.s, self.d

    @property
    def attn_scale(self) -> float:
        return self.d**-0.5


class RotaryAttention:
    """A forward graph and its gradient graph, built, with the buffers that pass between them.

    strides: of q, k and v, in elements; o is laid out [b, s, h, d] in memory, as a model's output
    projection wants it.  engines: as pygraph takes them.
    """

    def __init__(
        self,
        sizes: Sizes,
        setting: Setting,
        freqs: Tensor,
        dtype: torch.dtype,
        strides: Sequence[Sequence[int] | None] = (None, None, None),
        engines: tuple[str, ...] | None = None,
    ) -> None:
        self.sizes, self.dtype, self.freqs = sizes, dtype, freqs
        _, h_q, s, d = sizes.q_dim
        self.o_stride = (s * h_q * d, d, h_q * d, 1)

        fold, fold_log2 = setting.fold, setting.fold_log2
        g = rg.pygraph("forward", dtype, fold=fold, fold_log2=fold_log2, engines=engines)
        q = g.tensor(sizes.q_dim, strides[0], name="q")
        k = g.tensor(sizes.kv_dim, strides[1], name="k")
        v = g.tensor(sizes.kv_dim, strides[2], name="v")
        angles = g.tensor(freqs.shape, data_type=torch.float32, name="freqs")
        q_rot = g.rope(q, angles, rope_dim=sizes.rotated, name="rope_q").set_name("q_rot")
        k_rot = g.rope(k, angles, rope_dim=sizes.rotated, name="rope_k").set_name("k_rot")
        o, stats = g.sdpa(
            q_rot, k_rot, v, attn_scale=sizes.attn_scale, use_causal_mask=True, name="attention"
        )
        o.set_output(True).set_name("o").set_stride(self.o_stride)
        stats.set_name("stats")
        self.forward = g
        self.backward = g.backward_graph(outputs=[o], inputs=[q, k, v])
        self.forward.build()
        self.backward.build()

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Execute the forward. Returns o, and all else that the backward has to be handed."""
        pack = {"q": q, "k": k, "v": v, "freqs": self.freqs}
        pack |= self.forward.allocate(device=q.device)  # o, and what the backward wants saved
        self.forward.execute(pack)
        return {name: pack[name] for name in ("o", *self.backward.saved)}

    def run_backward(self, do: Tensor, handed: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Execute the gradient graph on what run_forward returned. Returns dq, dk, dv."""
        incoming = self.backward.find_tensor("do")
        if list(do.stride()) != incoming.get_stride():
            do = self.backward.allocate("do", device=do.device)["do"].copy_(do)
        grads = self.backward.allocate(device=do.device)
        self.backward.execute({**handed, "do": do, **grads})
        return grads["dq"], grads["dk"], grads["dv"]
