"""pygraph: record operations, build, execute. The names are cuDNN Frontend's."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any

from ropegraph.api import report
from ropegraph.api.backward import derive
from ropegraph.api.cache_ops import CacheOps
from ropegraph.api.checks import as_choice, as_flag, as_name, refuse_unknown
from ropegraph.api.handle import Handle, as_handle
from ropegraph.api.matmul_ops import MatmulOps
from ropegraph.api.mla_ops import MlaOps
from ropegraph.api.norm_ops import NormOps
from ropegraph.api.proof import Proof
from ropegraph.api.qkv_ops import QkvOps
from ropegraph.api.recording import Recorder
from ropegraph.api.sdpa_ops import SdpaOps
from ropegraph.api.svg import to_svg
from ropegraph.api.tensor import Tensor
from ropegraph.api.variant_pack import meant
from ropegraph.compile import device_of, engine_names
from ropegraph.dtypes import as_compute, as_dtype
from ropegraph.errors import GraphError
from ropegraph.ir import serialize
from ropegraph.ir.contract import Fold, FoldContract
from ropegraph.ir.mermaid import to_mermaid
from ropegraph.lowering.plan import Plan
from ropegraph.passes import pipeline
from ropegraph.passes.rewrite import Decision

# FE constructor arguments without a meaning here, with the defaults at which they are accepted.
_UNSERVED: dict[str, Any] = {
    "kernel_cache": None,
    "is_dynamic_shape_enabled": False,
    "is_override_shape_enabled": False,
    "cuda_graph_retention": None,
    "is_cuda_graph_replay_expected": False,
}
FOLDS: tuple[Fold, ...] = ("auto", "off", "q", "symmetric")


class pygraph(  # noqa: N801 - FE's name
    QkvOps, CacheOps, SdpaOps, MlaOps, MatmulOps, NormOps, Proof
):
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
        name = as_name(name, "pygraph: name")
        where = f"pygraph {name!r}"
        given = dict(
            fe_arguments,
            kernel_cache=kernel_cache,
            is_dynamic_shape_enabled=is_dynamic_shape_enabled,
            is_override_shape_enabled=is_override_shape_enabled,
            cuda_graph_retention=cuda_graph_retention,
        )
        # The signature is for a hint alone, and takes as long to read as a graph to record.
        known = signature(pygraph).parameters if fe_arguments else ()
        refuse_unknown(where, given, _UNSERVED, known=known)
        as_compute(intermediate_data_type, f"{where}: intermediate_data_type")
        self.name = name
        self.recorder = Recorder(
            name,
            as_dtype(io_data_type, f"{where}: io_data_type"),
            as_compute(compute_data_type, f"{where}: compute_data_type"),
        )
        self._handle = None if handle is None else as_handle(handle, f"{where}: handle")
        self._fold: Fold = as_choice(fold, f"{where}: fold", FOLDS)
        self._fold_log2 = as_flag(fold_log2, f"{where}: fold_log2")
        if self._fold_log2 and self._fold == "off":
            raise GraphError(
                f"{where}: fold_log2=True needs a rotation that may carry 1/ln 2, but fold='off'; "
                "use fold='q' or 'symmetric'"
            )
        if fold_contract is not None and not isinstance(fold_contract, FoldContract):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(
                f"{where}: fold_contract={fold_contract!r:.60}; use forward.fold_contract"
            )
        self._contract = fold_contract
        self._engines = engine_names(engines)
        self.saved: list[str] = []
        super().__init__()

    # Tensors

    def tensor(
        self,
        dim: object,
        stride: Iterable[int] | None = None,
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
        if as_flag(is_virtual, f"tensor {name!r}: is_virtual"):
            raise GraphError(f"tensor {name!r}: is_virtual=True, but no node writes an input")
        tensor = self.recorder.add_tensor(dim, name)
        try:
            if stride is not None:
                tensor.set_stride(stride)
            tensor.set_data_type(data_type).set_is_pass_by_value(is_pass_by_value)
            tensor.set_ragged_offset(ragged_offset)
            tensor.set_ragged_offset_multiplier(ragged_offset_multiplier)
            tensor.set_alignment_value(alignment_value)
            if reordering_type is not None:
                tensor.set_reordering_type(reordering_type)
            if uid is not None:
                tensor.set_uid(uid)
        except GraphError:
            self.recorder.tensors.remove(tensor)
            raise
        return tensor

    def tensor_like(self, template: Any, name: str = "", is_virtual: bool = False) -> Tensor:
        """An input with the dims, strides and data type of a torch, DLPack or graph tensor."""
        if as_flag(is_virtual, f"tensor_like {name!r}: is_virtual"):
            raise GraphError(f"tensor_like {name!r}: is_virtual=True, but no node writes an input")
        return self.recorder.add_like(template, name)

    def __getattr__(self, name: str) -> Any:
        served = (
            "rope, rope_backward, qkv_rope, qkv_rope_backward, sdpa, sdpa_backward, scale, mul, "
        )
        served += "rmsnorm, rmsnorm_backward"
        raise AttributeError(
            f"pygraph has no {name!r}; of cuDNN Frontend's operations it serves {served}"
        )

    # What was done, and why not more

    @property
    def trace(self) -> tuple[pipeline.Trace, ...]:
        """The graph as recorded so far and after each pass, with what the pass decided."""
        return pipeline.run(self._look())

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
        # It names the engine that draws each dropout mask, which compiling may still change.
        self._close("fold_contract")
        self.build_plans()
        return self.lowered.contract

    def why_not(self, engine: str) -> dict[str, tuple[str, ...]]:
        """Node name -> every rule it breaks on ``engine``; empty if that engine could run all."""
        for name in engine_names(engine) or ():
            return self.lowered.why_not(name)
        raise GraphError(f"why_not: engine={engine!r}; give the name of an engine")

    def explain(self) -> str:
        """What was folded, by how much, which engine runs what, and why not more."""
        return report.explain(self.lowered)

    def to_mermaid(self, stage: str = "recorded") -> str:
        """The graph as a Mermaid flowchart, "recorded" or "lowered" (scaled nodes marked)."""
        as_choice(stage, "to_mermaid: stage", ("recorded", "lowered"))
        if stage == "recorded":
            return to_mermaid(self._look())
        return to_mermaid(self.plan.graph, before=self._look())

    def to_svg(self, stage: str = "recorded") -> str:
        """The graph as an SVG drawing, "recorded" or "lowered" (scaled nodes marked).

        It stands by itself, in a file or in a page: nothing is loaded, nothing runs.
        """
        as_choice(stage, "to_svg: stage", ("recorded", "lowered"))
        if stage == "recorded":
            return to_svg(self._look())
        return to_svg(self.plan.graph, before=self._look())

    def _repr_svg_(self) -> str | None:
        """What a notebook shows: the graph as recorded, once it is built as lowered."""
        try:
            return self.to_svg("recorded" if self._lowered is None else "lowered")
        except GraphError:  # a recording that is no graph yet has no drawing, only a repr
            return None

    def __str__(self) -> str:
        return str(self._frozen if self.recorder.closed_by else self._freeze())

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
        return list(self.recorder.tensors)

    def find_tensor(self, name: str) -> Tensor:
        """The tensor called ``name``.  Raises GraphError if none or several are."""
        name = as_name(name, "find_tensor")
        found = [t for t in self.recorder.tensors if t.get_name() == name]
        if len(found) != 1:
            names = sorted(t.get_name() for t in self.recorder.tensors)
            count = f"{len(found)} tensors" if found else f"no tensor{meant(name, names)}"
            raise GraphError(f"{name!r} names {count}; the names are {', '.join(names)}")
        return found[0]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings another graph of the same kind is made with."""
        recorder = self.recorder
        return {
            "io_data_type": recorder.io,
            "compute_data_type": recorder.compute,
            "handle": self._handle,
            "engines": self._engines,
        }

    # Storage

    def serialize(self) -> bytes:
        """The graph, its settings and contract as versioned JSON with a checksum."""
        return serialize.dumps(self._look())

    def deserialize(self, data: bytes | str) -> pygraph:
        """Fill this empty graph with a serialized one.  Raises GraphError if it is damaged."""
        if self.recorder.nodes or self.recorder.tensors:
            raise GraphError(f"graph {self.name!r}: deserialize needs a new, empty graph")
        graph = serialize.loads(data)
        self.name, self._fold, self._fold_log2 = graph.name, graph.fold, graph.fold_log2
        self._contract, self.saved = graph.contract, list(graph.imported)
        self.recorder.load(graph)
        self.validate()
        return self

    @property
    def key(self) -> str:
        """A hash that changes with every field that lowering reads."""
        context = (str(device_of(self._device())), str(self._engines))
        return serialize.key(self._look(), context)
