"""The recording methods of sdpa and sdpa_backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropegraph.api import attention
from ropegraph.api.checks import as_count
from ropegraph.api.recording import Recorder, shaped_like
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError
from ropegraph.ir.ops import Sdpa, SdpaBackward

_GRADS = {"dQ": "q", "dK": "k", "dV": "v"}
_EXTRA_GRADS = {"dBias": "bias", "dSink_token": "sink_token"}


class SdpaOps:
    """Part of pygraph: attention and its gradient."""

    recorder: Recorder

    def sdpa(
        self,
        q: Any,
        k: Any,
        v: Any,
        attn_scale: Any = None,
        *,
        is_inference: bool | None = None,
        generate_stats: bool | None = None,
        bias: Any = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Any = None,
        seq_len_kv: Any = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: Any = "TOP_LEFT",
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Any = None,
        paged_attention_k_table: Any = None,
        paged_attention_v_table: Any = None,
        paged_attention_max_seq_len_kv: int | None = None,
        sink_token: Any = None,
        score_mod: Any = None,
        softcap: float | None = None,
        softmax_input_is_log2: bool = False,
        name: str = "",
        **fe_arguments: Any,
    ) -> list[Any]:
        """softmax(logits) v: returns [O, Stats]; Stats is None if it is not wanted.

        q: [b, h_q, s_q, d_qk].  k: [b, h_k, s_kv, d_qk].  v: [b, h_v, s_kv, d_v]; h_q is a multiple
        of h_k and h_v.  All fp16, bf16, fp32 or fp64.  O: [b, h_q, s_q, d_v] in the dtype of q.
        Stats: [b, h_q, s_q, 1], fp32 (fp64 for fp64 data), the natural log-sum-exp of the logits.
        The order on the logits: attn_scale (None is 1), score_mod (or softcap), bias, ALiBi,
        padding, diagonal band, sink, softmax, dropout.
        attn_scale: number or one-element tensor.  bias: broadcasts to [b, h_q, s_q, s_kv].
        diagonal_band_left_bound: keys kept up to and including the diagonal.
        seq_len_q, seq_len_kv: [b, 1, 1, 1] int32 or int64.  dropout: (p, seed, offset).
        k and v are pools [pages, h, page, d] when page tables [b, 1, n, 1] are given.
        sink_token: [1, h_q, 1, 1] raw logits.  score_mod(graph, scores): traced once.
        softmax_input_is_log2: q.k is a base-2 logit, its natural value is ln 2 * attn_scale * q.k.
        Rows with no key give O 0 and Stats -inf (the sink's value if there is one).
        Raises GraphError naming the argument. Source: cuDNN Frontend 1.32, sdpa.
        """
        given = dict(locals())
        name = self.recorder.node_name(Sdpa, name)
        where = f"sdpa {name!r}"
        ports = self.recorder.adopt_all({"q": q, "k": k, "v": v}, where)
        tables = {n: given[n] for n in ("paged_attention_k_table", "paged_attention_v_table")}
        paged = _paged(where, tables, paged_attention_max_seq_len_kv)
        s_kv = _sequence(ports["k"]) if paged is None else paged
        args = attention.AttentionArguments(where, self.recorder, ports["q"], s_kv)
        for port, table in tables.items():
            args.tensor(port, table)
        args.common(given, _ragged(ports), attention.UNSERVED)
        wants_stats = attention.generate_stats(where, generate_stats, is_inference)
        made = self.recorder.record(
            Sdpa(max_seq_len_kv=paged, **args.attrs),
            name,
            ports | args.ports,
            ("O", "Stats") if wants_stats else ("O",),
        )
        return [made["O"], made.get("Stats")]

    def sdpa_backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        dO: Any,
        stats: Any,
        attn_scale: Any = None,
        *,
        bias: Any = None,
        dBias: Tensor | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Any = None,
        seq_len_kv: Any = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: Any = "TOP_LEFT",
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Any = None,
        use_deterministic_algorithm: bool = False,
        sink_token: Any = None,
        dSink_token: Tensor | None = None,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        softcap: float | None = None,
        softmax_input_is_log2: bool = False,
        name: str = "",
        **fe_arguments: Any,
    ) -> list[Tensor]:
        """Gradients of ``sdpa`` with the same arguments: returns [dQ, dK, dV].

        o, stats: what the forward gave (natural log-sum-exp).  dO: [b, h_q, s_q, d_v].
        dBias: an output handle with bias's dims.  dSink_token: likewise, [1, h_q, 1, 1].
        use_deterministic_algorithm: two runs give the same bits, or the graph does not build.
        score_mod_bprop: accepted; the derivative comes from the trace of score_mod itself.
        Raises GraphError naming the argument. Source: cuDNN Frontend 1.32, sdpa_backward.
        """
        given = dict(locals())
        name = self.recorder.node_name(SdpaBackward, name)
        where = f"sdpa_backward {name!r}"
        data = {"q": q, "k": k, "v": v, "o": o, "dO": dO, "stats": stats}
        ports = self.recorder.adopt_all(data, where)
        args = attention.AttentionArguments(where, self.recorder, ports["q"], _sequence(ports["k"]))
        if score_mod_bprop is not None and score_mod is None:
            raise GraphError(f"{where}: score_mod_bprop without score_mod; give both")
        args.flag("deterministic", use_deterministic_algorithm, "use_deterministic_algorithm")
        args.common(given, _ragged(ports), attention.UNSERVED_BACKWARD)
        extra: dict[str, Tensor] = {}
        for port, source in _EXTRA_GRADS.items():
            if given[port] is not None:
                if source not in args.ports:
                    raise GraphError(f"{where}: {port} is asked for without {source}")
                extra[port] = self.recorder.adopt(given[port], f"{where}: {port}")
        made = self.recorder.record(
            SdpaBackward(**args.attrs), name, ports | args.ports, (*_GRADS, *extra), extra
        )
        return [shaped_like(made[grad], ports[source]) for grad, source in _GRADS.items()]


def _sequence(tensor: Tensor) -> int:
    dim = tensor.get_dim()
    return dim[2] if len(dim) == 4 else 0


def _ragged(ports: Mapping[str, Tensor]) -> list[str]:
    return [port for port, t in ports.items() if t.get_ragged_offset() is not None]


def _paged(where: str, tables: Mapping[str, Any], longest: int | None) -> int | None:
    """The logical s_kv of paged k and v, None when they are not paged."""
    given = [name for name, table in tables.items() if table is not None]
    if len(given) == 1:
        raise GraphError(f"{where}: {given[0]} is given alone; k and v are paged together")
    if longest is None:
        if given:
            raise GraphError(f"{where}: {given[0]} needs paged_attention_max_seq_len_kv")
        return None
    if not given:
        raise GraphError(
            f"{where}: paged_attention_max_seq_len_kv={longest} needs paged_attention_k_table and "
            "paged_attention_v_table"
        )
    return as_count(longest, f"{where}: paged_attention_max_seq_len_kv")
