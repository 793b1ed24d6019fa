"""Checks of what the caller passed: every message names the argument, its value, and what fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from ropegraph.api.meant import meant_by
from ropegraph.errors import GraphError

Word = TypeVar("Word", bound=str)


def as_dims(given: object, argument: str) -> tuple[int, ...]:
    """Read dims: a sequence of integers, none negative."""
    dims = _integers(given, argument)
    if any(n < 0 for n in dims):
        raise GraphError(f"{argument}={list(dims)} has a negative extent; use 0 or more")
    return dims


def as_strides(given: object, dim: tuple[int, ...], argument: str) -> tuple[int, ...]:
    """Read strides in elements: one per dim, none negative."""
    strides = _integers(given, argument)
    if len(strides) != len(dim):
        raise GraphError(
            f"{argument}={list(strides)} has {len(strides)} entries for dim {list(dim)}"
        )
    if any(s < 0 for s in strides):
        raise GraphError(f"{argument}={list(strides)} has a negative stride; use 0 or more")
    return strides


def _integers(given: object, argument: str) -> tuple[int, ...]:
    try:
        items = tuple(cast("Iterable[Any]", given))
        numbers = tuple(int(n) for n in items)
    except (TypeError, ValueError, OverflowError):
        raise GraphError(f"{argument}={given!r} is not a list of integers") from None
    if any(n != m for n, m in zip(numbers, items, strict=True)):
        raise GraphError(f"{argument}={given!r} is not a list of integers")
    return numbers


def is_tensor(given: object) -> bool:
    """True for torch, numpy and other framework tensors: what DLPack can exchange."""
    return hasattr(given, "__dlpack__")


def as_number(given: object, argument: str) -> float:
    """Read a finite host number: int, float, or anything with __float__ but a tensor.

    -0.0 is read as 0.0: they compare equal, so that whoever keeps plans by their attributes could
    not tell which of them a plan was made for.
    """
    if is_tensor(given) or hasattr(given, "set_output"):  # of a framework, or of a graph
        raise GraphError(f"{argument} is a tensor; it is fixed at build, so give a host number")
    if isinstance(given, (bool, str, type)) or not hasattr(given, "__float__"):
        raise GraphError(f"{argument}={given!r:.60} is not a number")
    try:
        number = float(cast(Any, given))
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise GraphError(f"{argument}={given!r:.60} is not finite")
    return number + 0.0


def as_count(given: object, argument: str, low: int = 0) -> int:
    """Read an integer of at least ``low`` that int64 can hold."""
    if type(given) is int and low <= given < 2**63:  # what torch.compile can follow, of a size too
        return given
    if isinstance(given, (bool, type)) or is_tensor(given) or not hasattr(given, "__index__"):
        raise GraphError(f"{argument}={given!r:.60} is not a host integer; use {low} or more")
    number = int(cast(Any, given))
    if number < low:
        raise GraphError(f"{argument}={number}; use {low} or more")
    if number >= 2**63:
        raise GraphError(f"{argument}={number}; use less than 2**63")
    return number


def as_choice(given: object, argument: str, words: tuple[Word, ...]) -> Word:
    """Read one of a few words."""
    for word in words:
        if isinstance(given, str) and given == word:
            return word
    raise GraphError(f"{argument}={given!r:.60}; use one of {', '.join(map(repr, words))}")


def as_name(given: object, argument: str = "name") -> str:
    """Read a name: text, or a number as text; None and "" stand for no name."""
    if given is None or isinstance(given, (str, int)):
        return "" if given is None else str(given)
    raise GraphError(f"{argument}={given!r:.60} is no name; use text")


def as_list(given: object, argument: str) -> list[Any]:
    """Read a list, a tuple or anything else to go through but text and tensors."""
    if not is_tensor(given) and not isinstance(given, str) and isinstance(given, Iterable):
        return list(cast("Iterable[Any]", given))
    raise GraphError(f"{argument}={given!r:.60}; use a list")


def as_flag(given: object, argument: str) -> bool:
    """Read a bool, numpy's too; None means False."""
    if given is None or type(given).__name__ in ("bool", "bool_"):
        return bool(given)
    raise GraphError(f"{argument}={given!r:.60}; use True or False")


def refuse_unknown(
    where: str,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    known: Iterable[str] = (),
) -> None:
    """Accept cuDNN Frontend keywords at their defaults; refuse all else by name.

    given: the keywords left over.  defaults: keywords that exist in FE 1.32 but mean nothing here.
    known: the keywords that were read, for a hint at a misspelt one.
    """
    for keyword, value in given.items():
        if keyword not in defaults:
            hint = meant_by(keyword, (*known, *defaults))
            raise GraphError(f"{where}: {keyword}={value!r:.60} is no argument here{hint}")
        default = defaults[keyword]
        # A tensor compares element by element: only plain values may equal a default.
        is_plain = isinstance(value, (bool, int, float, str))
        if value is not default and not (is_plain and value == default):
            raise GraphError(
                f"{where}: {keyword}={value!r:.60} is not supported; "
                f"leave it out, or at its default {default!r}"
            )
