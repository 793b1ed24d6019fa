"""Does a value that was read from a file fit the annotation of its field?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints


def check_fields(found: Any) -> None:
    """Raise TypeError at the first field of a dataclass that holds what its type does not allow."""
    for name, hint in _hints(cast("type[Any]", type(found))):
        value = getattr(found, name)
        if not fits(value, hint):
            raise TypeError(f"{name} of {type(found).__name__} is {value!r:.60}")


def fits(value: Any, hint: Any) -> bool:
    """True if ``value`` is of the type that ``hint`` is."""
    origin, of = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in of)
    if origin is Literal:
        return any(type(value) is type(word) and value == word for word in of)
    if origin is tuple:
        return isinstance(value, tuple) and _fits_all(cast("tuple[Any, ...]", value), of)
    if origin is frozenset:
        every = cast("frozenset[Any]", value)
        return isinstance(value, frozenset) and all(fits(x, of[0]) for x in every)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            return False
        pairs = cast("Mapping[Any, Any]", value).items()
        return all(fits(k, of[0]) and fits(x, of[1]) for k, x in pairs)
    return _is_a(value, hint if origin is None else origin)


def _fits_all(values: tuple[Any, ...], of: tuple[Any, ...]) -> bool:
    if len(of) == 2 and of[1] is Ellipsis:
        return all(fits(x, of[0]) for x in values)
    return len(values) == len(of) and all(map(fits, values, of))


def _is_a(value: Any, hint: Any) -> bool:
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if hint is float:
        return type(value) in (int, float)
    if hint in (bool, int, str):
        return type(value) is hint
    return isinstance(value, hint)


@cache
def _hints(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((f.name, hints[f.name]) for f in fields(kind))
