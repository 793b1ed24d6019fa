"""The keys of a variant pack: a tensor, its name where no other has it, or its uid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from ropegraph.api.recording import Recorder
from ropegraph.api.tensor import Tensor
from ropegraph.errors import GraphError


def keys_of(recorder: Recorder) -> dict[Any, str]:
    """A tensor, its name where no other has it, or its uid -> the name of its value."""
    found: dict[Any, str] = {}
    counts = Counter(tensor.get_name() for tensor in recorder.tensors)
    for tensor, name in recorder.names().items():
        found[tensor] = name
        if counts[tensor.get_name()] == 1:
            found[name] = name
        if tensor.get_uid() >= 0:
            found[tensor.get_uid()] = name
    return found


def meant(key: object, names: Sequence[str]) -> str:
    """The end of a message about a name that is none: the nearest one, if there is one."""
    folded = {name.lower(): name for name in names}
    near = get_close_matches(str(key).lower(), folded, n=1)
    return f" (did you mean {folded[near[0]]!r}?)" if near else ""


class Keys:
    """Every key that a pack may use, looked up once; the recording is closed by then.

    bound: value name -> the framework tensor that the graph was recorded with.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.graph, self.tensors = recorder.name, recorder.tensors
        self.names = keys_of(recorder)
        self.counts: Mapping[Any, int] = Counter(t.get_name() for t in recorder.tensors)
        self.bound = {
            name: tensor.spec.bound
            for tensor, name in recorder.names().items()
            if tensor.spec.bound is not None
        }

    def buffers(self, pack: Mapping[Any, Any]) -> dict[str, Any]:
        """Value name -> buffer.  Raises GraphError for a key that means no tensor of this graph.

        None keys and unknown uids are left out, as FE does.
        """
        given = self.given(pack)
        return {**self.bound, **given} if self.bound else given

    def given(self, pack: Mapping[Any, Any]) -> dict[str, Any]:
        """The same without what the graph was recorded with."""
        given: dict[str, Any] = {}
        ignored, names = 0, self.names
        for key, buffer in pack.items():
            name = names.get(key)
            if name is None:
                self._refuse_key(key)
                ignored += 1
            else:
                given[name] = buffer
        if len(given) + ignored < len(pack):
            self._refuse_twice(pack)
        return given

    def _refuse_key(self, key: object) -> None:
        if key is None or hasattr(key, "__index__"):
            return
        if isinstance(key, Tensor):
            raise GraphError(f"execute: tensor {key.get_name()!r} belongs to another graph")
        if self.counts[key] > 1:
            raise GraphError(
                f"execute: {key!r} names {self.counts[key]} tensors of graph {self.graph!r}; give "
                "the Tensor itself or its uid, or call set_name on one of them"
            )
        bindable = (t.get_name() for t in self.tensors if not t.get_is_virtual())
        names = sorted(name for name in bindable if name in self.names)
        raise GraphError(
            f"execute: {key!r} names no tensor of graph {self.graph!r}{meant(key, names)}; there "
            f"are {', '.join(names)}"
        )

    def _refuse_twice(self, pack: Mapping[Any, Any]) -> None:
        """Several keys may mean one tensor, but then they must give one buffer."""
        given: dict[str, Any] = {}
        for key, buffer in pack.items():
            name = self.names.get(key)
            if name is not None and given.setdefault(name, buffer) is not buffer:
                raise GraphError(f"execute: {name!r} is given two buffers, the second by {key!r}")
