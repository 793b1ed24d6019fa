"""The keywords of sdpa and sdpa_backward, read into attributes and ports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from ropegraph.api.checks import as_choice, as_count, as_flag, as_number, is_tensor, refuse_unknown
from ropegraph.api.recording import Recorder
from ropegraph.api.score_trace import trace
from ropegraph.api.tensor import Tensor
from ropegraph.dtypes import as_compute
from ropegraph.errors import GraphError
from ropegraph.ir.score_mod import ScoreProgram, softcap

_DLPACK_CPU = 1

# FE keywords that mean nothing here, with the defaults at which they are accepted.
UNSERVED: dict[str, Any] = {
    "block_mask": None,
    "rng_dump": None,
    "score_max": None,
    "score_sum_exp": None,
    "unfuse_fma": False,
    "cu_seq_len_q": None,
    "cu_seq_len_kv": None,
    "stats_use_log2": False,
    "softmax_precision": None,
    "attn_scale_prefolded": False,
    "kv_mask": None,
    "out_dims": None,
}
UNSERVED_BACKWARD: dict[str, Any] = {
    "rng_dump": None,
    "softmax_precision": None,
    "attn_scale_prefolded": False,
    "out_dims": None,
}


class AttentionArguments:
    """Collects attributes and optional input ports of one sdpa or sdpa_backward call."""

    def __init__(self, where: str, recorder: Recorder, q: Tensor, s_kv: int) -> None:
        self.where, self.recorder = where, recorder
        b, h_q, s_q, _ = q.get_dim() if len(q.get_dim()) == 4 else (0, 0, 0, 0)
        self.scores = (b, h_q, s_q, s_kv)
        self.attrs: dict[str, Any] = {}
        self.ports: dict[str, Tensor] = {}

    def common(
        self, given: Mapping[str, Any], ragged: list[str], unserved: Mapping[str, Any]
    ) -> None:
        """Read the keywords that sdpa and sdpa_backward share.

        ragged: the ports whose tensors are ragged.  unserved: FE keywords without a meaning here.
        """
        self.hints(given, unserved, bool(ragged))
        self.scale(given["attn_scale"])
        self.tensor("bias", given["bias"])
        self.flag("alibi", given["use_alibi_mask"], "use_alibi_mask")
        self.band(given)
        self.padding(given["use_padding_mask"], given["seq_len_q"], given["seq_len_kv"], ragged)
        self.dropout(given["dropout"])
        self.score_mod(given["score_mod"], given["softcap"])
        self.tensor("sink_token", given["sink_token"])
        self.flag("softmax_input_is_log2", given["softmax_input_is_log2"])

    def tensor(self, port: str, given: Any) -> None:
        """An optional input tensor."""
        if given is not None:
            self.ports[port] = self.recorder.adopt(given, f"{self.where}: {port}")

    def scale(self, given: Any) -> None:
        """attn_scale: None is 1, as in cuDNN; a number; or a one-element tensor."""
        if given is None:
            self.attrs["attn_scale"] = 1.0
        elif not _is_tensor(given):
            self.attrs["attn_scale"] = as_number(given, f"{self.where}: attn_scale")
        else:
            self.attrs["attn_scale"] = None
            self.ports["attn_scale"] = self._scalar(given, "attn_scale")

    def _scalar(self, given: Any, argument: str) -> Tensor:
        """A one-element tensor; a framework tensor on the CPU is passed by value."""
        tensor = _rank4_of(self.recorder.adopt(given, f"{self.where}: {argument}"))
        if not isinstance(given, Tensor) and given.__dlpack_device__()[0] == _DLPACK_CPU:
            tensor.set_is_pass_by_value(True)
        return tensor

    def band(self, given: Mapping[str, Any]) -> None:
        """The diagonal band, from FE's present and deprecated names."""
        where = self.where
        causal, bottom = (
            as_flag(given[name], f"{where}: {name}")
            for name in ("use_causal_mask", "use_causal_mask_bottom_right")
        )
        window, left = given["sliding_window_length"], given["diagonal_band_left_bound"]
        right, alignment = given["diagonal_band_right_bound"], given["diagonal_alignment"]
        if causal and bottom:
            raise GraphError(
                f"{where}: use_causal_mask and use_causal_mask_bottom_right are both True; "
                "use one of them"
            )
        if window is not None and left is not None:
            raise GraphError(
                f"{where}: sliding_window_length={window} and diagonal_band_left_bound={left} are "
                "two names of one bound; use the second"
            )
        name = "sliding_window_length" if left is None else "diagonal_band_left_bound"
        left = window if left is None else left
        left = None if left is None else as_count(left, f"{where}: {name}", 1)
        right = None if right is None else as_count(right, f"{where}: diagonal_band_right_bound")
        if causal or bottom:
            if right not in (None, 0):
                raise GraphError(
                    f"{where}: a causal mask is diagonal_band_right_bound=0, but {right} is given"
                )
            right = 0
        word = getattr(alignment, "name", alignment)
        chosen = as_choice(word, f"{where}: diagonal_alignment", ("TOP_LEFT", "BOTTOM_RIGHT"))
        at_end = bottom or chosen == "BOTTOM_RIGHT"
        if causal and chosen == "BOTTOM_RIGHT":
            raise GraphError(
                f"{where}: use_causal_mask is top-left, but diagonal_alignment is BOTTOM_RIGHT; "
                "use diagonal_band_right_bound=0 with it"
            )
        if at_end and left is None and right is None:
            raise GraphError(
                f"{where}: diagonal_alignment=BOTTOM_RIGHT has no effect without a band; add "
                "diagonal_band_right_bound=0 for a causal mask, or a left bound"
            )
        self.attrs.update(left_bound=left, right_bound=right, bottom_right=at_end)

    def padding(self, use: Any, seq_len_q: Any, seq_len_kv: Any, ragged: list[str]) -> None:
        """Real lengths per sequence: both or none, with the mask."""
        use = as_flag(use, f"{self.where}: use_padding_mask")
        lengths = {"seq_len_q": seq_len_q, "seq_len_kv": seq_len_kv}
        given = [name for name, t in lengths.items() if t is not None]
        if given and not use:
            raise GraphError(f"{self.where}: {given[0]} has no effect; add use_padding_mask=True")
        if use and len(given) < 2:
            missing = next(n for n in lengths if n not in given)
            raise GraphError(f"{self.where}: use_padding_mask=True needs {missing} as well")
        if ragged and not use:
            raise GraphError(
                f"{self.where}: {ragged[0]} is ragged, which needs use_padding_mask=True with "
                "seq_len_q and seq_len_kv"
            )
        self.attrs["padding"] = use
        for name, tensor in lengths.items():
            if tensor is not None:
                self.ports[name] = _rank4_of(self.recorder.adopt(tensor, f"{self.where}: {name}"))

    def dropout(self, given: Any) -> None:
        """dropout=(p, seed, offset); seed and offset are tensors or host integers."""
        if given is None:
            return
        where = f"{self.where}: dropout"
        if not isinstance(given, (tuple, list)):
            raise GraphError(f"{where}={given!r:.60}; use (probability, seed, offset)")
        items = list(cast("Sequence[Any]", given))
        if len(items) != 3 or _is_tensor(items[0]):
            raise GraphError(
                f"{where} is given as (mask, scale), which is not supported; "
                "use (probability, seed, offset)"
            )
        p = as_number(items[0], f"{where} probability")
        if not 0.0 <= p < 1.0:
            raise GraphError(f"{where} probability={p}; use 0 or more and less than 1")
        if p == 0.0:
            return
        self.attrs["dropout_p"] = p
        for port, item in zip(("seed", "offset"), items[1:], strict=True):
            if _is_tensor(item):
                self.ports[port] = self._scalar(item, f"dropout {port}")
            else:
                self.ports[port] = self.recorder.host_integer(as_count(item, f"{where} {port}"))

    def score_mod(self, callback: Any, cap: Any) -> None:
        """A callback on (graph, scores), or softcap as its shorthand."""
        program: ScoreProgram | None = None
        if callback is not None and cap is not None:
            raise GraphError(f"{self.where}: give score_mod or softcap={cap}, not both")
        if cap is not None:
            number = as_number(cap, f"{self.where}: softcap")
            if number <= 0:
                raise GraphError(f"{self.where}: softcap={number}; use a positive number")
            program = softcap(number)
        elif callback is not None:
            program, ports = trace(self.where, callback, self.scores, self.recorder.adopt)
            self.ports.update(ports)
        self.attrs["score_mod"] = program

    def flag(self, attribute: str, given: Any, argument: str = "") -> None:
        self.attrs[attribute] = as_flag(given, f"{self.where}: {argument or attribute}")

    def hints(self, given: Mapping[str, Any], unserved: Mapping[str, Any], ragged: bool) -> None:
        """Accept hints that change no number; refuse what has no meaning here, by name."""
        rest = dict(given["fe_arguments"])
        rest.pop("implementation", None)
        for name in ("max_total_seq_len_q", "max_total_seq_len_kv"):
            total = rest.pop(name, None)
            if total is not None:
                as_count(total, f"{self.where}: {name}")
                if not ragged:
                    raise GraphError(f"{self.where}: {name}={total} needs ragged q, k and v")
        compute = rest.pop("compute_data_type", None)
        self.attrs["compute"] = as_compute(compute, f"{self.where}: compute_data_type")
        refuse_unknown(self.where, rest, unserved, known=given)


def generate_stats(where: str, stats: Any, inference: Any) -> bool:
    """True unless the caller said that Stats is not wanted. FE allows one of the two names."""
    if stats is not None and inference is not None:
        raise GraphError(
            f"{where}: generate_stats={stats} and is_inference={inference} are two names of one "
            "choice; give one"
        )
    if inference is not None:
        return not as_flag(inference, f"{where}: is_inference")
    return stats is None or as_flag(stats, f"{where}: generate_stats")


def _is_tensor(given: Any) -> bool:
    return isinstance(given, Tensor) or is_tensor(given)


def _rank4_of(tensor: Tensor) -> Tensor:
    """[b] becomes [b, 1, 1, 1], and a 0-d scalar [1, 1, 1, 1], as FE promotes them."""
    dim, stride = tensor.get_dim(), tensor.get_stride()
    if len(dim) < 2:
        ones = [1] * (4 - len(dim))
        tensor.set_dim([*dim, *ones]).set_stride([*stride, *ones])
    return tensor
