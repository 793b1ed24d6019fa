"""The recording method of cache_write, and what rope needs to write into a cache."""

from __future__ import annotations

from typing import Any

from ropegraph.api.checks import refuse_unknown
from ropegraph.api.recording import Recorder
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError
from ropegraph.ir.cache import writes_cache
from ropegraph.ir.ops import CACHE_PORTS, CacheWrite


class CacheOps:
    """Part of pygraph: what goes into a KV cache as it is."""

    recorder: Recorder

    def cache_write(
        self,
        input: Any,  # noqa: A002 - as in rope
        cache: Any = None,
        cache_positions: Any = None,
        name: str = "",
        **fe_arguments: Any,
    ) -> Tensor:
        """Write the rows of ``input``, V as a rule, into a cache, and return the written cache.

        input: [b, h, s, d].  cache: [b, h, s_max, d], any strides, an input of the graph.
        cache_positions: [b], int32 or int64: rows cache_positions[i] to cache_positions[i] + s - 1
        of batch entry i are overwritten, in place; all others keep their bits.
        Bits are copied; a cache of another dtype is rounded to. Beside a rope(cache=) at the same
        cache_positions it takes no launch of its own. It has no gradient.
        Raises GraphError if shapes do not fit; PositionError, at execute on a CPU and before
        anything is written, for rows outside of the cache.
        """
        name = self.recorder.node_name(CacheWrite, name)
        where = f"cache_write {name!r}"
        refuse_unknown(where, fe_arguments, {}, known=("cache", "cache_positions"))
        ports = {"input": self.recorder.adopt(input, f"{where}: input")}
        ports |= cache_ports(self.recorder, where, cache, cache_positions)
        if "cache" not in ports:
            raise GraphError(f"{where}: give cache= and cache_positions=")
        made = self.recorder.record(CacheWrite(), name, ports, ("output",))
        return written(made["output"], ports["cache"])


def cache_ports(recorder: Recorder, where: str, cache: Any, positions: Any) -> dict[str, Tensor]:
    """The ports of a cache and of the rows that are written; none if neither is given."""
    if cache is None and positions is None:
        return {}
    if cache is None or positions is None:
        given, other = CACHE_PORTS if positions is None else CACHE_PORTS[::-1]
        raise GraphError(f"{where}: {given}= is given without {other}=; a cache needs both")
    tensor = recorder.adopt(cache, f"{where}: cache")
    if tensor.get_ragged_offset() is not None or tensor.get_is_pass_by_value():
        raise GraphError(f"{where}: cache {tensor.get_name()!r} is ragged or passed by value")
    maker = recorder.producer(tensor)
    if maker is not None and not writes_cache(maker):
        raise GraphError(
            f"{where}: cache {tensor.get_name()!r} is made by {maker.name!r}; use an input of the "
            "graph, or what an earlier write into it returned"
        )
    return {
        "cache": tensor,
        "cache_positions": recorder.adopt(positions, f"{where}: cache_positions"),
    }


def written(output: Tensor, cache: Tensor) -> Tensor:
    """The handle of a written cache: it has the memory of ``cache``."""
    output.spec.in_place_of = cache
    return output.set_stride(cache.get_stride())
