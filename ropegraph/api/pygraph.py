"""pygraph: record operations, build, execute. The names are cuDNN Frontend's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ropegraph.api import attention, report
from ropegraph.api.backward import derive
from ropegraph.api.checks import as_choice, as_count, as_flag, as_number, refuse_unknown
from ropegraph.api.handle import Handle
from ropegraph.api.recording import Recorder, declare
from ropegraph.api.rotary import rotation
from ropegraph.api.tensor import Tensor, packed_like
from ropegraph.compile import Lowered, compile_plan, device_of, engine_names, lower
from ropegraph.dtypes import as_dtype
from ropegraph.errors import GraphError
from ropegraph.execution.run import Runnable
from ropegraph.ir import serialize
from ropegraph.ir.contract import FoldContract
from ropegraph.ir.graph import Graph as IrGraph
from ropegraph.ir.mermaid import to_mermaid
from ropegraph.ir.ops import Rope, RopeBackward, Scale, Sdpa, SdpaBackward
from ropegraph.lowering.plan import Plan
from ropegraph.passes.rewrite import Decision

# FE constructor arguments without a meaning here, with the defaults at which they are accepted.
_UNSERVED: dict[str, Any] = {
    "kernel_cache": None,
    "is_dynamic_shape_enabled": False,
    "is_override_shape_enabled": False,
    "cuda_graph_retention": None,
    "is_cuda_graph_replay_expected": False,
}
FOLDS = ("auto", "off", "q", "symmetric")


class pygraph:  # noqa: N801 - FE's name
    """A graph of rope and sdpa operations.

    io_data_type: the type of tensors that declare none.  intermediate_data_type: types values
    inside a fused step only.  compute_data_type: at least fp32 is used, fp64 for fp64 data.
    handle: where to run; None is the current device.
    sm_count, sm_version, device_property: hints, accepted.
    fold: where attn_scale goes: "auto", "off", "q" or "symmetric".  fold_log2: move 1 / ln 2 as
    well.  fold_contract: in a backward graph, ``forward.fold_contract``.
    engines: names of the engines that may be used, in order; None is the default order.
    Raises GraphError for any other FE argument that is not at its default.
    """

    def __init__(
        self,
        name: str = "graph",
        io_data_type: object = None,
        intermediate_data_type: object = None,
        compute_data_type: object = None,
        handle: Handle | None = None,
        sm_count: int | None = None,
        sm_version: int | None = None,
        kernel_cache: object = None,
        device_property: object = None,
        is_dynamic_shape_enabled: bool = False,
        is_override_shape_enabled: bool = False,
        cuda_graph_retention: object = None,
        *,
        fold: str = "auto",
        fold_log2: bool = False,
        fold_contract: FoldContract | None = None,
        engines: object = None,
        **fe_arguments: Any,
    ) -> None:
        where = f"pygraph {name!r}"
        given = dict(
            fe_arguments,
            kernel_cache=kernel_cache,
            is_dynamic_shape_enabled=is_dynamic_shape_enabled,
            is_override_shape_enabled=is_override_shape_enabled,
            cuda_graph_retention=cuda_graph_retention,
        )
        refuse_unknown(where, given, _UNSERVED)
        as_dtype(intermediate_data_type, f"{where}: intermediate_data_type")
        self.name = name
        self._recorder = Recorder(
            name,
            as_dtype(io_data_type, f"{where}: io_data_type"),
            as_dtype(compute_data_type, f"{where}: compute_data_type"),
        )
        self._handle = handle
        self._fold = as_choice(fold, f"{where}: fold", FOLDS)
        self._fold_log2 = as_flag(fold_log2, f"{where}: fold_log2")
        if self._fold_log2 and self._fold == "off":
            raise GraphError(
                f"{where}: fold_log2=True needs a rotation that may carry 1/ln 2, but fold='off'; "
                "use fold='q' or 'symmetric'"
            )
        if fold_contract is not None and not isinstance(fold_contract, FoldContract):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"{where}: fold_contract={fold_contract!r:.60}; use forward.fold_contract")
        self._contract = fold_contract
        self._engines = engine_names(engines)
        self._ir: IrGraph | None = None
        self._lowered: Lowered | None = None
        self._runnables: dict[torch.device, Runnable] = {}
        self._keys: dict[Any, str] = {}
        self._bound: dict[str, Any] = {}
        self.saved: list[str] = []

    # Tensors

    def tensor(
        self,
        dim: object,
        stride: object = None,
        data_type: object = None,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Tensor | None = None,
        reordering_type: object = None,
        name: str = "",
        uid: int | None = None,
        ragged_offset_multiplier: int = 1,
        alignment_value: int = 1,
        **fe_arguments: Any,
    ) -> Tensor:
        """An input (or an output handle to pass to dBias= or dSink_token=).

        dim: [b, h, s, d].  stride: in elements, row-major if left out.  uid: None or -1 is unset.
        ragged_offset: [b + 1, 1, 1, 1] element offsets of the sequences.
        Raises GraphError on a negative extent, a duplicate uid, or an unknown keyword.
        """
        refuse_unknown(f"tensor {name!r}", fe_arguments, {})
        if is_virtual:
            raise GraphError(f"tensor {name!r}: is_virtual=True, but no node writes an input")
        tensor = self._recorder.add_tensor(self, dim, name)
        try:
            declare(tensor, stride, data_type, is_pass_by_value, ragged_offset)
            tensor.set_ragged_offset_multiplier(ragged_offset_multiplier)
            tensor.set_alignment_value(alignment_value)
            if reordering_type is not None:
                tensor.set_reordering_type(reordering_type)
            if uid is not None:
                tensor.set_uid(uid)
        except GraphError:
            self._recorder.tensors.remove(tensor)
            raise
        return tensor

    def tensor_like(self, template: Any, name: str = "", is_virtual: bool = False) -> Tensor:
        """An input with the dims, strides and data type of a torch, DLPack or graph tensor."""
        if is_virtual:
            raise GraphError(f"tensor_like {name!r}: is_virtual=True, but no node writes an input")
        return self._recorder.add_like(self, template, name)

    # Operations

    def rope(
        self,
        input: Any,
        freqs: Any = None,
        output_scale: float = 1.0,
        rope_dim: int = 0,
        compute_data_type: object = None,
        name: str = "",
        *,
        rope_offset: int | None = None,
        interleaved: bool = False,
        interleaved_output: bool | None = None,
        attention_factor: float = 1.0,
        inverse: bool = False,
        half_width: bool = False,
        table_layout: str | None = None,
        angle_precision: str = "float32",
        numerics: str = "fp32",
        cp_size: int = 1,
        cp_rank: int = 0,
        **sources: Any,
    ) -> Tensor:
        """Rotate channel pairs of ``input`` by ``freqs``, then multiply every row by output_scale.

        input: [b, h, s, D], fp16, bf16, fp32 or fp64; ragged if it has a ragged_offset, positions
        then restart in each sequence.  freqs: [s_max, 1 or b, 1, rope_dim] radians, fp32; row i
        belongs to position i.
        rope_dim: width r of the rotated segment, even; 0 is D.  rope_offset: its first channel,
        D - r if left out (cuDNN's tail; TransformerEngine and Hugging Face use 0).
        interleaved: pairs (2i, 2i+1) instead of (i, i + r/2); interleaved_output: as input.
        attention_factor: multiplies the rotated channels alone.  inverse: rotate by -freqs.
        half_width: freqs has r/2 columns.  table_layout: which columns of a full-width table hold
        the angles: "first_half" (cuDNN), "pairs" (t0 t0 t1 t1) or "full" (a column per channel).
        Returns [b, h, s, D] in the dtype of input unless set, computed in fp32 (fp64 for fp64
        input), rounded once.
        Raises GraphError if r is odd or wider than D, or the table is too narrow or too short.
        Source: arXiv:2104.09864, eq. 34.
        """
        options = dict(locals())
        return self._rotate(Rope, "rope", "input", options)

    def rope_backward(
        self,
        dY: Any,  # noqa: N803 - FE's name
        freqs: Any = None,
        output_scale: float = 1.0,
        rope_dim: int = 0,
        compute_data_type: object = None,
        name: str = "",
        *,
        rope_offset: int | None = None,
        interleaved: bool = False,
        interleaved_output: bool | None = None,
        attention_factor: float = 1.0,
        inverse: bool = False,
        half_width: bool = False,
        table_layout: str | None = None,
        angle_precision: str = "float32",
        numerics: str = "fp32",
        cp_size: int = 1,
        cp_rank: int = 0,
        **sources: Any,
    ) -> Tensor:
        """The exact adjoint of ``rope`` with the same attributes: dX from dY, same shapes."""
        options = dict(locals())
        return self._rotate(RopeBackward, "rope_backward", "dY", options)

    def _rotate(
        self, kind: type[Rope] | type[RopeBackward], word: str, port: str, options: dict[str, Any]
    ) -> Tensor:
        options.pop("self")
        options |= options.pop("sources")
        name = str(options.pop("name") or "")
        where = f"{word} {name!r}"
        as_dtype(options.pop("compute_data_type"), f"{where}: compute_data_type")
        data = self._recorder.adopt(self, options.pop(port), f"{where}: {port}")
        dim = data.get_dim()
        attrs = rotation(kind, where, dim[-1] if dim else 0, **options)
        table = self._recorder.adopt(self, options["freqs"], f"{where}: freqs")
        out_port = "output" if kind is Rope else "dX"
        made = self._recorder.record(
            self, attrs, name, {port: data, "freqs": table}, (out_port,)
        )
        return _shaped_like(made[out_port], data)

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
        where = f"sdpa {name!r}"
        adopt = self._adopt
        tq, tk, tv = (adopt(t, f"{where}: {p}") for p, t in (("q", q), ("k", k), ("v", v)))
        tables = {
            "paged_attention_k_table": paged_attention_k_table,
            "paged_attention_v_table": paged_attention_v_table,
        }
        paged = _paged(where, tables, paged_attention_max_seq_len_kv)
        s_kv = paged if paged is not None else _sequence(tk)
        args = attention.AttentionArguments(where, adopt, tq, s_kv)
        for port, given in tables.items():
            args.tensor(port, given)
        self._common(
            args,
            attn_scale=attn_scale,
            bias=bias,
            use_alibi_mask=use_alibi_mask,
            band=(
                use_causal_mask,
                use_causal_mask_bottom_right,
                sliding_window_length,
                diagonal_alignment,
                diagonal_band_left_bound,
                diagonal_band_right_bound,
            ),
            padding=(use_padding_mask, seq_len_q, seq_len_kv),
            dropout=dropout,
            score=(score_mod, softcap),
            sink_token=sink_token,
            log2=softmax_input_is_log2,
            ragged=_ragged(("q", tq), ("k", tk), ("v", tv)),
            fe_arguments=fe_arguments,
            unserved=attention.UNSERVED,
        )
        wants_stats = attention.generate_stats(where, generate_stats, is_inference)
        made = self._recorder.record(
            self,
            Sdpa(max_seq_len_kv=paged, **args.attrs),
            str(name or ""),
            {"q": tq, "k": tk, "v": tv, **args.ports},
            ("O", "Stats") if wants_stats else ("O",),
        )
        return [made["O"], made.get("Stats")]

    def sdpa_backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        dO: Any,  # noqa: N803 - FE's name
        stats: Any,
        attn_scale: Any = None,
        *,
        bias: Any = None,
        dBias: Tensor | None = None,  # noqa: N803
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
        dSink_token: Tensor | None = None,  # noqa: N803
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
        where = f"sdpa_backward {name!r}"
        given = (("q", q), ("k", k), ("v", v), ("o", o), ("dO", dO), ("stats", stats))
        ports = {port: self._adopt(t, f"{where}: {port}") for port, t in given}
        args = attention.AttentionArguments(where, self._adopt, ports["q"], _sequence(ports["k"]))
        if score_mod_bprop is not None and score_mod is None:
            raise GraphError(f"{where}: score_mod_bprop without score_mod; give both")
        args.flag("deterministic", use_deterministic_algorithm, "use_deterministic_algorithm")
        self._common(
            args,
            attn_scale=attn_scale,
            bias=bias,
            use_alibi_mask=use_alibi_mask,
            band=(
                use_causal_mask,
                use_causal_mask_bottom_right,
                sliding_window_length,
                diagonal_alignment,
                diagonal_band_left_bound,
                diagonal_band_right_bound,
            ),
            padding=(use_padding_mask, seq_len_q, seq_len_kv),
            dropout=dropout,
            score=(score_mod, softcap),
            sink_token=sink_token,
            log2=softmax_input_is_log2,
            ragged=_ragged(*ports.items()),
            fe_arguments=fe_arguments,
            unserved=attention.UNSERVED_BACKWARD,
        )
        extra: dict[str, Tensor] = {}
        for port, handle, source in (
            ("dBias", dBias, "bias"),
            ("dSink_token", dSink_token, "sink_token"),
        ):
            if handle is not None:
                if source not in args.ports:
                    raise GraphError(f"{where}: {port} is asked for without {source}")
                extra[port] = self._adopt(handle, f"{where}: {port}")
        made = self._recorder.record(
            self,
            SdpaBackward(**args.attrs),
            str(name or ""),
            ports | args.ports,
            ("dQ", "dK", "dV", *extra),
            extra,
        )
        return [
            _shaped_like(made[grad], ports[source])
            for grad, source in (("dQ", "q"), ("dK", "k"), ("dV", "v"))
        ]

    def _common(
        self, args: attention.AttentionArguments, *, attn_scale: Any, bias: Any,
        use_alibi_mask: Any, band: tuple[Any, ...], padding: tuple[Any, Any, Any], dropout: Any,
        score: tuple[Any, Any], sink_token: Any, log2: Any, ragged: list[str],
        fe_arguments: Mapping[str, Any], unserved: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """What sdpa and sdpa_backward read in the same way."""
        args.hints(fe_arguments, unserved, bool(ragged))
        args.scale(attn_scale)
        args.tensor("bias", bias)
        args.flag("alibi", use_alibi_mask, "use_alibi_mask")
        args.band(*band)
        args.padding(*padding, ragged)
        args.dropout(dropout, self._host_integer)
        args.score_mod(*score)
        args.tensor("sink_token", sink_token)
        args.flag("softmax_input_is_log2", log2)

    def _adopt(self, given: Any, where: str) -> Tensor:
        return self._recorder.adopt(self, given, where)

    def _host_integer(self, number: int) -> Tensor:
        """A host scalar that carries its own value."""
        tensor = self.tensor([1, 1, 1, 1], data_type=torch.int64, is_pass_by_value=True)
        tensor.spec.bound = number
        return tensor

    def scale(self, input: Any, scale: float, name: str = "", **fe_arguments: Any) -> Tensor:
        """input times a host number; folds into a rotation before or after it where that is exact."""
        refuse_unknown(f"scale {name!r}", fe_arguments, {"compute_data_type": None})
        factor = as_number(scale, f"scale {name!r}: scale")
        data = self._adopt(input, f"scale {name!r}: input")
        made = self._recorder.record(self, Scale(factor), str(name or ""), {"input": data}, ("output",))
        return _shaped_like(made["output"], data)

    def mul(self, a: Any, b: Any, name: str = "", **fe_arguments: Any) -> Tensor:
        """a times b, where one of them is a host number."""
        numbers = [x for x in (a, b) if isinstance(x, (int, float))]
        if len(numbers) != 1:
            raise GraphError(
                f"mul {name!r}: a={a!r:.40}, b={b!r:.40}; one must be a tensor and one a host number"
            )
        return self.scale(b if a is numbers[0] else a, numbers[0], name, **fe_arguments)

    # Life cycle

    def require_open(self, action: str) -> None:
        self._recorder.require_open(action)

    def own(self, tensor: Tensor, argument: str) -> Tensor:
        return self._adopt(tensor, argument)

    def default_name(self, tensor: Tensor) -> str:
        return self._recorder.default_name(tensor)

    def claim_uid(self, tensor: Tensor, uid: int) -> int | None:
        """The uid to store, None for -1.  Raises GraphError if another tensor has it."""
        number = as_count(uid, f"tensor {tensor.get_name()!r}: uid", -1)
        if number == -1:
            return None
        for other in self._recorder.tensors:
            if other is not tensor and other.get_uid() == number:
                raise GraphError(
                    f"tensor {tensor.get_name()!r}: uid={number} belongs to {other.get_name()!r}; "
                    "use another"
                )
        return number

    def validate(self) -> None:
        """Settle names, data types and shapes; the graph cannot change from then on."""
        if self._ir is None:
            if not self._recorder.nodes:
                raise GraphError(f"graph {self.name!r} has no operation")
            self._ir = self._recorder.freeze(self._fold, self._fold_log2, self._contract)
            self._recorder.closed_by = "validate()"
            self._index()

    def _index(self) -> None:
        """Every key a variant pack may use: handles, unambiguous names, uids."""
        names = self._recorder.names()
        counts: dict[str, int] = {}
        for tensor in self._recorder.tensors:
            counts[tensor.get_name()] = counts.get(tensor.get_name(), 0) + 1
        for tensor, name in names.items():
            self._keys[tensor] = name
            if counts[tensor.get_name()] == 1:
                self._keys[name] = name
            if tensor.get_uid() >= 0:
                self._keys[tensor.get_uid()] = name
            if tensor.spec.bound is not None:
                self._bound[name] = tensor.spec.bound

    def build_operation_graph(self) -> None:
        """Run the passes and choose an engine for every node."""
        self.validate()
        if self._lowered is None:
            assert self._ir is not None
            self._lowered = lower(self._ir, device_of(self._device()), self._engines)

    def _device(self) -> torch.device:
        """Where the graph will run: its handle, the tensors it was recorded with, or the default."""
        if self._handle is not None:
            return self._handle.device
        for bound in self._bound.values():
            if isinstance(bound, torch.Tensor) and bound.device.type != "cpu":
                return bound.device
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def create_execution_plans(self, heuristics: object = None) -> None:
        """Plan; the heuristics are a hint."""
        self.build_operation_graph()

    def check_support(self) -> None:
        """Raise UnsupportedError, with every broken rule, if no allowed engine takes a node."""
        self.build_operation_graph()

    def build_plans(self, policy: object = None) -> None:
        """Compile every step."""
        self.build_operation_graph()
        self._runnable(device_of_torch := self._device())
        del device_of_torch

    def build(self, heuristics: object = None, policy: object = None) -> None:
        """validate, plan and compile in one call."""
        self.build_plans(policy)

    def _runnable(self, device: torch.device) -> Runnable:
        """The compiled plan for a device: a graph built for a GPU also runs on CPU buffers."""
        if device not in self._runnables:
            self.build_operation_graph()
            assert self._lowered is not None and self._ir is not None
            where, lowered = device_of(device), self._lowered
            if where != lowered.plan.device:
                lowered = lower(self._ir, where, self._engines)
            self._runnables[device] = compile_plan(lowered.plan)
        return self._runnables[device]

    def get_workspace_size(self) -> int:
        """Bytes of workspace that execute() needs."""
        return self.plan.workspace_bytes

    def execute(
        self, variant_pack: Mapping[Any, Any], workspace: Any = None, handle: Handle | None = None
    ) -> None:
        """Run on the caller's buffers; outputs are written in place.

        variant_pack: Tensor, name or uid -> torch or DLPack tensor.  None keys and unknown uids are
        ignored, as in FE.  workspace: get_workspace_size() bytes; None takes an arena kept for this
        thread and stream.
        Raises GraphError, nothing written, for a missing, wrongly shaped, typed or placed buffer.
        """
        if not self._keys:
            self.validate()
        buffers = dict(self._bound)
        keys = self._keys
        for key, buffer in variant_pack.items():
            name = keys.get(key)
            if name is None:
                self._refuse_key(key)
            else:
                buffers[name] = buffer
        stream = None
        handle = handle or self._handle
        if handle is not None:
            handle.require_open()
            stream = handle.stream
        runnable = self._runnables.get(_CPU) if len(self._runnables) == 1 else None
        if runnable is None:
            runnable = self._runnable(self._buffers_device(buffers))
        if len(buffers) > len(runnable.binder.required):
            self._refuse_virtual(buffers)
        runnable(buffers, workspace, stream)

    def _buffers_device(self, buffers: Mapping[str, Any]) -> torch.device:
        for buffer in buffers.values():
            if isinstance(buffer, torch.Tensor) and buffer.device.type != "cpu":
                return buffer.device
        return _CPU if any(isinstance(b, torch.Tensor) for b in buffers.values()) else self._device()

    def _refuse_key(self, key: object) -> None:
        if key is None or isinstance(key, int):
            return
        if isinstance(key, Tensor):
            raise GraphError(f"execute: tensor {key.get_name()!r} belongs to another graph")
        names = sorted(n for n in self._keys if isinstance(n, str))
        raise GraphError(
            f"execute: {key!r} names no single tensor of graph {self.name!r}; "
            f"its names are {', '.join(names)}"
        )

    def _refuse_virtual(self, buffers: Mapping[str, Any]) -> None:
        assert self._ir is not None
        for name in buffers:
            if name in self._ir.values and self._ir.is_virtual(name):
                raise GraphError(
                    f"execute: {name!r} is virtual, it has no buffer; call set_output(True) on it "
                    "before the graph is built"
                )

    # What was done, and why not more

    @property
    def lowered(self) -> Lowered:
        """The graph after the passes, with its plan."""
        self.build_operation_graph()
        assert self._lowered is not None
        return self._lowered

    @property
    def plan(self) -> Plan:
        """The launches: ``len(graph.plan.steps)`` counts them."""
        return self.lowered.plan

    @property
    def fold_decisions(self) -> tuple[Decision, ...]:
        """What each pass did at each node, or why it did nothing there."""
        return self.lowered.decisions

    @property
    def fold_contract(self) -> FoldContract:
        """What a backward graph of this forward must agree with: pass it as fold_contract=."""
        return self.lowered.contract

    def why_not(self, engine: str) -> dict[str, tuple[str, ...]]:
        """Node name -> every rule it breaks on ``engine``; empty if that engine could run all."""
        return self.lowered.why_not(engine)

    def explain(self) -> str:
        """What was folded, by how much, which engine runs what, and why not more."""
        return report.explain(self.lowered)

    def to_mermaid(self, stage: str = "recorded") -> str:
        """The graph as a Mermaid flowchart, "recorded" or "lowered" (scaled nodes marked)."""
        as_choice(stage, "to_mermaid: stage", ("recorded", "lowered"))
        self.validate()
        assert self._ir is not None
        if stage == "recorded":
            return to_mermaid(self._ir)
        return to_mermaid(self.plan.graph, before=self._ir)

    def __str__(self) -> str:
        return str(self._ir or self._recorder.freeze(self._fold, self._fold_log2, self._contract))

    def backward_graph(self, outputs: list[Any], inputs: list[Any]) -> pygraph:
        """The graph of the gradients of ``inputs``, given those of ``outputs``.

        outputs, inputs: tensors of this graph or their names.  The gradient of tensor x is named
        dx.  ``.saved`` lists the tensors it needs from the forward; those that are not inputs or
        outputs there are marked with set_saved. The fold is that of this graph.
        Raises GraphError for a gradient that does not exist (attn_scale, lengths, page tables), or
        if the graph was built before and does not export what is needed.
        """
        return derive(self, outputs, inputs)

    # Looking things up

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._recorder.tensors)

    def find_tensor(self, name: str) -> Tensor:
        """The tensor called ``name``.  Raises GraphError if none or several are."""
        found = [t for t in self._recorder.tensors if t.get_name() == name]
        if len(found) != 1:
            names = ", ".join(sorted(t.get_name() for t in self._recorder.tensors))
            raise GraphError(f"{name!r} names {len(found)} tensors; the names are {names}")
        return found[0]

    @property
    def recorder(self) -> Recorder:
        """What was recorded so far."""
        return self._recorder

    @property
    def settings(self) -> dict[str, Any]:
        """The settings another graph of the same kind is made with."""
        recorder = self._recorder
        return dict(
            io_data_type=recorder.io,
            compute_data_type=recorder.compute,
            handle=self._handle,
            engines=self._engines,
        )

    # Storage

    def serialize(self) -> bytes:
        """The graph, its settings and contract as versioned JSON with a checksum."""
        self.validate()
        assert self._ir is not None
        return serialize.dumps(self._ir)

    def deserialize(self, data: bytes | str) -> pygraph:
        """Fill this empty graph with a serialized one.  Raises GraphError if it is damaged."""
        if self._recorder.nodes or self._recorder.tensors:
            raise GraphError(f"graph {self.name!r}: deserialize needs a new, empty graph")
        graph = serialize.loads(data)
        self.name, self._fold, self._fold_log2 = graph.name, graph.fold, graph.fold_log2
        self._contract = graph.contract
        self._recorder.load(self, graph)
        self.validate()
        return self

    @property
    def key(self) -> str:
        """A hash that changes with every field that lowering reads."""
        self.validate()
        assert self._ir is not None
        return serialize.key(self._ir, (str(device_of(self._device())), str(self._engines)))


_CPU = torch.device("cpu")


def _shaped_like(tensor: Tensor, source: Tensor) -> Tensor:
    """Give an output the layout of the tensor it comes from: the same memory order, packed.

    A ragged one keeps strides and offsets exactly, for its offsets count in those strides.
    """
    if tuple(tensor.get_dim()) == tuple(source.get_dim()):
        if (offset := source.get_ragged_offset()) is not None:
            tensor.set_stride(source.get_stride()).set_ragged_offset(offset)
            tensor.set_ragged_offset_multiplier(source.get_ragged_offset_multiplier())
        else:
            tensor.set_stride(packed_like(tuple(source.get_dim()), tuple(source.get_stride())))
    return tensor


def _sequence(tensor: Tensor) -> int:
    dim = tensor.get_dim()
    return dim[2] if len(dim) == 4 else 0


def _ragged(*tensors: tuple[str, Tensor]) -> list[str]:
    return [port for port, t in tensors if t.get_ragged_offset() is not None]


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


