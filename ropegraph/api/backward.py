"""Derive the graph of gradients from a forward graph.

The backward is recorded as the chain rule reads on the graph as recorded; the forward's contract
then folds it as the forward was folded. So what runs is what a hand-made backward would be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ropegraph.api.checks import as_list
from ropegraph.api.recording import RecordedNode
from ropegraph.api.tensor import Tensor
from ropegraph.errors import FoldContractError, GraphError
from ropegraph.ir.cache import writes_cache
from ropegraph.ir.ops import (
    CacheWrite,
    JoinQkv,
    Matmul,
    MlaKvRope,
    MlaKvRopeBackward,
    RmsNorm,
    RmsNormBackward,
    Rope,
    RopeBackward,
    RopeFreqsGrad,
    Scale,
    Sdpa,
    SdpaBackward,
    SplitQkv,
    Sum,
    op_name,
    shared,
)

if TYPE_CHECKING:
    from ropegraph.api.pygraph import pygraph

# Which output of the backward is the gradient of which input of the forward.
_ATTENTION_GRADS = {"q": "dQ", "k": "dK", "v": "dV", "bias": "dBias", "sink_token": "dSink_token"}


def derive(forward: pygraph, outputs: list[Any], inputs: list[Any]) -> pygraph:
    """The gradient graph of ``inputs``, fold included; see pygraph.backward_graph."""
    return _Derivation(forward, outputs, inputs).run()


class _Derivation:
    def __init__(self, forward: pygraph, outputs: list[Any], inputs: list[Any]) -> None:
        self.forward = forward
        self.nodes = forward.recorder.nodes
        self.outputs = self._tensors(outputs, "outputs")
        self.inputs = self._tensors(inputs, "inputs")
        if not self.outputs or not self.inputs:
            raise GraphError("backward_graph: give at least one output and one input")
        for tensor in self.outputs:
            if tensor.spec.producer is None:
                raise GraphError(
                    f"backward_graph: output {tensor.get_name()!r} is an input of the graph"
                )
        self.wanted = self._on_the_way()
        self.copies: dict[Tensor, Tensor] = {}
        self.splits: dict[str, dict[str, Tensor]] = {}
        self.turned: dict[Tensor, Tensor] = {}
        self.partial: dict[Tensor, list[Tensor]] = {}

    def _tensors(self, given: Any, argument: str) -> list[Tensor]:
        """One tensor or several, each of them once."""
        one = isinstance(given, (str, Tensor))
        several = [given] if one else as_list(given, f"backward_graph: {argument}")
        return list(dict.fromkeys(self._tensor(t, argument) for t in several))

    def _tensor(self, given: Any, argument: str) -> Tensor:
        if isinstance(given, str):
            return self.forward.find_tensor(given)
        if not isinstance(given, Tensor) or given.recorder is not self.forward.recorder:
            raise GraphError(
                f"backward_graph: {argument}: {given!r:.60} is no tensor of this graph"
            )
        return given

    def _on_the_way(self) -> set[Tensor]:
        """Tensors through which an asked-for input reaches something."""
        found = set(self.inputs)
        for node in self.nodes:
            if any(t in found for t in node.inputs.values()):
                found |= set(node.outputs.values())
        return found

    def run(self) -> pygraph:
        from ropegraph.api.pygraph import pygraph as make

        # The fold must be known before the contract is handed on, so nothing may change after it.
        self._export()
        self.backward = make(
            f"{self.forward.name}_backward",
            fold_contract=self.forward.fold_contract,
            **self.forward.settings,
        )
        self.names = self.forward.recorder.names()
        for output in self.outputs:
            grad = self.backward.tensor(
                output.get_dim(),
                output.get_stride(),
                output.get_data_type(),
                name=f"d{output.get_name()}",
            )
            self._share_offset(grad, output)
            self.partial[output] = [grad]
        for node in reversed(self.nodes):
            if any(t in self.partial for t in node.outputs.values()):
                self._differentiate(node)
        for tensor in self.inputs:
            self._expose(tensor)
        self.backward.saved = [self._name(t) for t in self.copies]
        try:
            _ = self.backward.trace
        except FoldContractError as error:
            raise FoldContractError(
                f"backward_graph: {error}; record the forward with fold='auto'"
            ) from error
        return self.backward

    def _export(self) -> None:
        """Mark what the backward needs; a graph that is built already must export it by itself."""
        reaching = self._reaching()
        nodes = [n for n in self.nodes if set(n.outputs.values()) & reaching and self._is_wanted(n)]
        needed = [self._whole(t) for node in nodes for t in self._needs(node)]
        for node in nodes:
            if isinstance(node.attrs, RmsNorm) and "inv_variance" not in node.outputs:
                raise GraphError(
                    f"backward_graph: rmsnorm {node.name!r} gives no inv_variance; "
                    "record it with norm_forward_phase.TRAINING"
                )
            if isinstance(node.attrs, Sdpa) and "Stats" not in node.outputs:
                raise GraphError(
                    f"backward_graph: sdpa {node.name!r} gives no Stats; "
                    "record it with generate_stats=True"
                )
        missing = [t for t in needed if not t.is_real and not t.spec.is_saved]
        if missing and self.forward.recorder.closed_by:
            names = ", ".join(repr(t.get_name()) for t in dict.fromkeys(missing))
            raise GraphError(
                f"backward_graph: the forward {self.forward.name!r} is built and does not export "
                f"{names}; call backward_graph before build, or set_saved(True) on them"
            )
        for tensor in missing:
            tensor.set_saved(True)

    def _reaching(self) -> set[Tensor]:
        """Tensors that the asked-for outputs depend on."""
        found = set(self.outputs)
        for node in reversed(self.nodes):
            if found & set(node.outputs.values()):
                found |= set(node.inputs.values())
        return found

    def _is_wanted(self, node: RecordedNode) -> bool:
        return any(t in self.wanted for t in node.inputs.values())

    def _differentiate(self, node: RecordedNode) -> None:
        if not self._is_wanted(node):
            return
        match node.attrs:
            case Rope() | CacheWrite() if writes_cache(node):
                raise _through_cache(node)
            case Rope() as attrs:
                self._rope(node, attrs)
            case Scale(factor):
                grad = self._gradient(node.outputs["output"])
                made = self._record(
                    Scale(factor), f"{node.name}_backward", {"input": grad}, "output"
                )
                self._add(node.inputs["input"], made["output"])
            case Sdpa() as attrs:
                self._sdpa(node, attrs)
            case SplitQkv() as attrs:
                self._split(node, attrs)
            case Matmul():
                self._matmul(node)
            case MlaKvRope() as attrs:
                self._mla(node, attrs)
            case RmsNorm() as attrs:
                self._norm(node, attrs)
            case other:
                raise GraphError(
                    f"backward_graph: {op_name(other)} {node.name!r} has no gradient of its own; "
                    "derive from a forward graph"
                )

    def _rope(self, node: RecordedNode, attrs: Rope) -> None:
        self._refuse_gradients(node)
        grad = self._gradient(node.outputs["output"])
        ports = {p: self._copy(t) for p, t in node.inputs.items() if p != "input"}
        name = f"{node.name}_backward"
        if node.inputs["input"] in self.wanted:
            made = self._record(RopeBackward(**shared(attrs)), name, {"dY": grad} | ports, "dX")
            self._add(node.inputs["input"], made["dX"])
        if node.inputs.get("freqs") in self.wanted:
            x = self._copy(node.inputs["input"])
            ports = {"input": x, "dY": grad} | ports
            made = self._record(RopeFreqsGrad(**shared(attrs)), f"{name}_freqs", ports, "dfreqs")
            self._add(node.inputs["freqs"], made["dfreqs"])

    def _matmul(self, node: RecordedNode) -> None:
        """dA = dC B^T and dB = A^T dC, summed over the batch for a matrix that all entries use."""
        grad, wide = self._gradient(node.outputs["C"]), node.outputs["C"].get_dim()[0]
        for port in ("A", "B"):
            tensor = node.inputs[port]
            if tensor not in self.wanted:
                continue
            is_shared = tensor.get_dim()[0] == 1 and wide > 1
            if port == "A":
                attrs = Matmul(transpose_B=True, sum_batch=is_shared)
                ports = {"A": grad, "B": self._copy(node.inputs["B"])}
            else:
                attrs = Matmul(transpose_A=True, sum_batch=is_shared)
                ports = {"A": self._copy(node.inputs["A"]), "B": grad}
            made = self._record(attrs, f"{node.name}_backward_{port}", ports, "C")
            self._add(tensor, made["C"])

    def _split(self, node: RecordedNode, attrs: SplitQkv) -> None:
        grads = {
            part: self._gradient(tensor)
            for part, tensor in node.outputs.items()
            if tensor in self.partial
        }
        whole = node.inputs["qkv"]
        joined = JoinQkv(attrs.split, attrs.by_groups, tuple(whole.get_dim()))
        made = self._record(joined, f"{node.name}_backward", grads, "qkv")
        self._add(whole, made["qkv"])

    def _refuse_gradients(self, node: RecordedNode) -> None:
        """Of what a rotation reads, the data and freqs have a gradient."""
        for port, tensor in node.inputs.items():
            if tensor in self.wanted and port not in ("input", "freqs"):
                raise GraphError(
                    f"backward_graph: rope {node.name!r}: {port} {tensor.get_name()!r} has no "
                    "gradient; of what carries angles and positions only freqs has one"
                )
        is_ragged = node.inputs["input"].get_ragged_offset() is not None
        if is_ragged and node.inputs.get("freqs") in self.wanted:
            raise GraphError(
                f"backward_graph: rope {node.name!r}: freqs has no gradient for a ragged input"
            )

    def _mla(self, node: RecordedNode, attrs: MlaKvRope) -> None:
        where = f"backward_graph: mla_kv_rope {node.name!r}"
        if attrs.quantize is not None:
            raise GraphError(
                f"{where}: what quantize={attrs.quantize!r} writes has no gradient; derive from a "
                "forward with quantize=None"
            )
        for port in ("cos", "sin"):
            if node.inputs[port] in self.wanted:
                raise GraphError(f"{where}: {port} has no gradient; kv and k_rope have one")
        grads = {
            f"d{port.capitalize()}": self._gradient(tensor)
            for port, tensor in node.outputs.items()
            if tensor in self.partial
        }
        ports = grads | {port: self._copy(node.inputs[port]) for port in ("cos", "sin")}
        v_dim = node.inputs["kv"].get_dim()[3] - attrs.nope_dim
        wanted = {"kv": "dKV", "k_rope": "dK_rope"}
        wanted = {p: grad for p, grad in wanted.items() if node.inputs[p] in self.wanted}
        made = self._record(
            MlaKvRopeBackward(attrs.nope_dim, v_dim), f"{node.name}_backward", ports,
            *wanted.values(),
        )  # fmt: skip
        for port, grad in wanted.items():
            self._add(node.inputs[port], made[grad])

    def _norm(self, node: RecordedNode, attrs: RmsNorm) -> None:
        statistics = node.outputs["inv_variance"]
        if statistics in self.partial:
            raise GraphError(
                f"backward_graph: inv_variance of rmsnorm {node.name!r} has no gradient; ask for Y "
                "only"
            )
        x = node.inputs["input"]
        rope = self._rotated(x)
        ports = {
            "grad": self._gradient(node.outputs["Y"]),
            "input": self._copy(x) if rope is None else self._turned_again(x, rope),
            "scale": self._copy(node.inputs["scale"]),
            "inv_variance": self._copy(statistics),
        }
        grads = {"input": "DX", "scale": "Dscale"}
        grads = {p: grad for p, grad in grads.items() if node.inputs[p] in self.wanted}
        backward = RmsNormBackward(attrs.zero_centered, attrs.compute)
        made = self._record(backward, f"{node.name}_backward", ports, *grads.values())
        for port, grad in grads.items():
            self._add(node.inputs[port], made[grad])

    def _rotated(self, tensor: Tensor) -> RecordedNode | None:
        """The rope that makes a tensor again sooner than it is kept: one nobody else sees."""
        if tensor.is_real or tensor.spec.is_saved or tensor.spec.in_place_of is not None:
            return None
        made = next((n for n in self.nodes if n.name == tensor.spec.producer), None)
        return made if made is not None and isinstance(made.attrs, Rope) else None

    def _turned_again(self, tensor: Tensor, rope: RecordedNode) -> Tensor:
        """What a rope of the forward made, by the same rope in the backward."""
        if tensor not in self.turned:
            ports = {port: self._copy(t) for port, t in rope.inputs.items()}
            made = self._record(rope.attrs, rope.name, ports, "output")["output"]
            made.set_stride(tensor.get_stride()).set_data_type(tensor.get_data_type())
            self.turned[tensor] = made.set_name(self._name(tensor))
        return self.turned[tensor]

    def _needs(self, node: RecordedNode) -> list[Tensor]:
        """What the backward of a node reads from the forward."""
        if isinstance(node.attrs, RmsNorm):
            x, scale = node.inputs["input"], node.inputs["scale"]
            rope = self._rotated(x)
            kept = [x] if rope is None else list(rope.inputs.values())
            return [*kept, scale, *(t for p, t in node.outputs.items() if p == "inv_variance")]
        return _needs(node, self.wanted)

    def _sdpa(self, node: RecordedNode, attrs: Sdpa) -> None:
        for port, tensor in node.inputs.items():
            if tensor in self.wanted and port not in _ATTENTION_GRADS:
                raise GraphError(
                    f"backward_graph: sdpa {node.name!r}: {port} {tensor.get_name()!r} has no "
                    f"gradient; inputs that have one are {', '.join(_ATTENTION_GRADS)}"
                )
        if attrs.max_seq_len_kv is not None:
            raise GraphError(
                f"backward_graph: sdpa {node.name!r} reads paged k and v, which have no gradient"
            )
        if node.outputs.get("Stats") in self.partial:
            raise GraphError(
                f"backward_graph: Stats of sdpa {node.name!r} has no gradient; ask for O only"
            )
        ports = {p: self._copy(node.inputs[p]) for p in ("q", "k", "v")}
        ports["o"] = self._copy(node.outputs["O"])
        ports["dO"] = self._gradient(node.outputs["O"])
        ports["stats"] = self._copy(node.outputs["Stats"])
        optional = [p for p in node.inputs if p not in ports]
        ports |= {p: self._copy(node.inputs[p]) for p in optional}
        grads = {p: g for p, g in _ATTENTION_GRADS.items() if node.inputs.get(p) in self.wanted}
        made = self._record(
            SdpaBackward(**shared(attrs)), f"{node.name}_backward", ports, *grads.values()
        )
        for port, grad in grads.items():
            self._add(node.inputs[port], made[grad])

    def _record(self, attrs: Any, name: str, inputs: dict[str, Tensor], *outputs: str) -> Any:
        return self.backward.recorder.record(attrs, name, inputs, outputs)

    def _add(self, tensor: Tensor, grad: Tensor) -> None:
        """One more term of a tensor's gradient, laid out like the tensor."""
        grad.set_stride(tensor.get_stride() if 0 not in tensor.get_stride() else grad.get_stride())
        grad.set_data_type(tensor.get_data_type())
        self._share_offset(grad, tensor)
        self.partial.setdefault(tensor, []).append(grad)

    def _share_offset(self, grad: Tensor, tensor: Tensor) -> None:
        offset = tensor.get_ragged_offset()
        if offset is not None:
            grad.set_ragged_offset(self._copy(offset))
            grad.set_ragged_offset_multiplier(tensor.get_ragged_offset_multiplier())

    def _gradient(self, tensor: Tensor) -> Tensor:
        """The whole gradient of a tensor: the sum of what its readers gave."""
        terms = self.partial[tensor]
        if len(terms) == 1:
            return terms[0]
        ports = {str(i): t for i, t in enumerate(terms)}
        made = self._record(Sum(), f"sum_d{self._name(tensor)}", ports, "output")
        del self.partial[tensor]
        self._add(tensor, made["output"])
        return made["output"]

    def _expose(self, tensor: Tensor) -> None:
        if tensor not in self.partial:
            raise GraphError(f"backward_graph: the outputs do not depend on {tensor.get_name()!r}")
        grad = self._gradient(tensor)
        if grad.spec.producer is None:
            raise GraphError(
                f"backward_graph: {tensor.get_name()!r} is an output itself; its gradient is given"
            )
        if self._carries_a_fold(tensor):
            # A node of its own, so that the fold has where to return the scale to.
            made = self._record(Scale(1.0), f"d{self._name(tensor)}", {"input": grad}, "output")
            del self.partial[tensor]
            self._add(tensor, made["output"])
            grad = made["output"]
        grad.set_output(True).set_name(f"d{self._name(tensor)}")

    def _carries_a_fold(self, tensor: Tensor) -> bool:
        """True if a fold of the forward scaled ``tensor``: its gradient must not show that."""
        entries = self.forward.fold_contract.entries
        return any(
            factor != 1.0 and node.inputs[port] is tensor
            for node in self.nodes
            if isinstance(node.attrs, Sdpa) and node.name in entries
            for port, factor in zip(("q", "k"), entries[node.name].factors, strict=True)
        )

    def _parted(self, tensor: Tensor) -> RecordedNode | None:
        """The split that ``tensor`` comes from, directly or as what was rotated in its place."""
        name = (tensor.spec.in_place_of or tensor).spec.producer
        node = next((n for n in self.nodes if n.name == name), None)
        return node if node is not None and isinstance(node.attrs, SplitQkv) else None

    def _whole(self, tensor: Tensor) -> Tensor:
        """The tensor in whose memory the forward leaves ``tensor``; itself, if it has its own.

        Raises GraphError if that is a cache, which the next call of the forward writes over.
        """
        maker = next((n for n in self.nodes if n.name == tensor.spec.producer), None)
        if maker is not None and writes_cache(maker):
            raise _through_cache(maker)
        if tensor.is_real:
            return tensor
        split = self._parted(tensor)
        if split is None:
            return tensor
        part = tensor.spec.in_place_of or tensor
        is_overwritten = any(
            t.spec.in_place_of is part for n in self.nodes for t in n.outputs.values()
        )
        if is_overwritten and tensor is part:
            raise GraphError(
                f"backward_graph: {tensor.get_name()!r} is needed and was rotated in place; "
                "leave in_place out"
            )
        return self._whole(split.inputs["qkv"])

    def _part(self, tensor: Tensor, split: RecordedNode) -> Tensor:
        """A part of a packed tensor of the forward, taken from that tensor again."""
        if split.name not in self.splits:
            whole = self._copy(split.inputs["qkv"])
            made = self._record(split.attrs, split.name, {"qkv": whole}, *split.outputs)
            for part, old in split.outputs.items():
                made[part].set_name(self._name(old)).set_stride(old.get_stride())
            self.splits[split.name] = made
        part = tensor.spec.in_place_of or tensor
        return next(self.splits[split.name][p] for p, t in split.outputs.items() if t is part)

    def _copy(self, tensor: Tensor) -> Tensor:
        """The forward's tensor as an input of the backward, under the same name."""
        split = self._parted(tensor)
        if split is not None and not tensor.is_real:
            return self._part(tensor, split)
        if tensor not in self.copies:
            copy = self.backward.tensor_like(tensor, name=self._name(tensor))
            copy.set_is_pass_by_value(tensor.get_is_pass_by_value())
            copy.spec.bound, copy.spec.constant = tensor.spec.bound, tensor.spec.constant
            self.copies[tensor] = copy
            self._share_offset(copy, tensor)
        return self.copies[tensor]

    def _name(self, tensor: Tensor) -> str:
        return self.names[tensor]


def _through_cache(node: RecordedNode) -> GraphError:
    return GraphError(
        f"backward_graph: {op_name(node.attrs)} {node.name!r} writes into the cache "
        f"{node.inputs['cache'].get_name()!r}; no gradient goes through a cache write, so derive "
        "from a forward graph that leaves cache= out"
    )


def _needs(node: RecordedNode, wanted: set[Tensor]) -> list[Tensor]:
    """What the backward of a node reads from the forward."""
    if isinstance(node.attrs, Sdpa):
        return [*node.inputs.values(), *node.outputs.values()]
    if isinstance(node.attrs, Rope):
        tables = [t for port, t in node.inputs.items() if port != "input"]
        return [*tables, node.inputs["input"]] if node.inputs.get("freqs") in wanted else tables
    if isinstance(node.attrs, Matmul):
        other = {"A": "B", "B": "A"}
        return [node.inputs[other[p]] for p in other if node.inputs[p] in wanted]
    if isinstance(node.attrs, MlaKvRope):
        return [node.inputs["cos"], node.inputs["sin"]]
    return []
