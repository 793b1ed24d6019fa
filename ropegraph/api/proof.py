"""Is it right, on these buffers, and how fast is it? What a graph says of its own runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ropegraph.api import profiling, verifying
from ropegraph.api.life_cycle import LifeCycle
from ropegraph.api.profile import Profile
from ropegraph.api.raw_rows import raw_sides
from ropegraph.api.verification import Verification
from ropegraph.errors import GraphError


class Proof(LifeCycle):
    """Part of pygraph: verify() and profile(), which execute on the caller's buffers."""

    def verify(
        self, variant_pack: Mapping[Any, Any], *, raw: Mapping[Any, Any] | None = None
    ) -> Verification:
        """Execute, and compare every launch with the same operation in fp64 on the same inputs.

        Beside that, q_rot, k_rot and stats of each attention are compared with the fold: the
        log-sum-exp of their rows in fp64 tells the product of all scales, norms of rows beside the
        raw q and k their split. A scale that is off by four roundings of the type (a rounding is
        half its eps: 2^-8 in bf16) is wrong; a right one stays within two.
        variant_pack: as for execute(); outputs are written. Needs fp64 copies of all of it, and
        the whole matrix of scores.
        raw: for a backward graph, q and k before their rotation, by the tensors or names of the
        rotated ones that are bound: ``raw={"q_rot": q, "k_rot": k}``. Without it the split is
        unchecked, except in graphs that rotate q and k themselves.
        Returns the error of each output in ulp, the scales as found, where NaN or Inf came up, what
        kernels noticed of bad offsets, and warnings; ``.is_ok``, ``.first_bad``, ``.wrong_scales``,
        ``.by_node``, and str() for a table.
        Raises GraphError as execute() does, and for raw rows that fit no bound q or k.
        """
        runnable, buffers = self._read(variant_pack, "verify")
        if raw is not None and not isinstance(raw, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"verify: raw is {type(raw).__name__}; use a dict of tensors to rows")
        rows = self._keys.given(raw or {})
        return verifying.verify(runnable, buffers, raw_sides(runnable.plan.graph, rows))

    def profile(self, variant_pack: Mapping[Any, Any], *, seconds: float = 0.1) -> Profile:
        """Time every launch: device and host time, bytes, FLOPs, and the share of its limit.

        variant_pack: as for execute(). Outputs are written; inputs that the graph writes into are
        left alone, copies of them are used.  seconds: how long to repeat each launch for, about.
        The limits are measured in the same run: a copy that moves as many bytes, and a matmul. On a
        GPU the L2 cache is emptied before each timed launch.
        Returns ``.rows``, ``.to_dict()``, ``.to_json()``, ``.plot()``, and str() for a table.
        Raises GraphError as execute() does, and for seconds that are no positive number.
        """
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"profile: seconds={seconds!r:.60}; use a positive number")
        runnable, buffers = self._read(variant_pack, "profile")
        return profiling.profile(runnable, buffers, float(seconds))
