"""The recording method of matmul: projections in front of attention."""

from __future__ import annotations

from typing import Any

from ropegraph.api.checks import refuse_unknown
from ropegraph.api.recording import Recorder
from ropegraph.api.tensor import Tensor
from ropegraph.dtypes import DType, as_compute
from ropegraph.errors import GraphError
from ropegraph.ir.ops import Matmul


class MatmulOps:
    """Part of pygraph: products of matrices, by torch's own kernels on every device."""

    recorder: Recorder

    def matmul(
        self,
        A: Any,
        B: Any,
        compute_data_type: object = None,
        padding: float = 0.0,
        name: str = "",
        **fe_arguments: Any,
    ) -> Tensor:
        """C = A B for each batch entry: [b, m, k] by [b, k, n] gives [b, m, n].

        One of A and B may have a batch of 1, a weight say. Both have one data type, which C takes
        unless set; sums are at least fp32, and rounded as torch.matmul rounds them. A transposed
        matrix is one with its strides exchanged.
        Raises GraphError if the shapes do not fit.
        """
        name = self.recorder.node_name(Matmul, name)
        where = f"matmul {name!r}"
        refuse_unknown(where, {**fe_arguments, "padding": padding}, {"padding": 0.0})
        if as_compute(compute_data_type, f"{where}: compute_data_type") is DType.DOUBLE:
            raise GraphError(
                f"{where}: compute_data_type={compute_data_type!r}; sums are fp32, fp64 for fp64 "
                "data; leave it out"
            )
        ports = self.recorder.adopt_all({"A": A, "B": B}, where)
        return self.recorder.record(Matmul(), name, ports, ("C",))["C"]
