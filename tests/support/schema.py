"""Say in JSON which keys and types an answer has, by the classes that it is made of."""

from __future__ import annotations

import types
from dataclasses import is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

#: The type of each value in JSON.
_PLAIN = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
#: The end of a key that may be missing, and the key that stands for any.
OPTIONAL, ANY = "?", "*"


def schema(*kinds: object) -> Any:
    """Return the schema of an object that has the keys of all ``kinds``, or of another value.

    A kind is a class, or a dict of further keys with their kinds.
    """
    if len(kinds) > 1:
        return {key: one for kind in kinds for key, one in schema(kind).items()}
    (kind,) = kinds
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, dict):
        return {key: schema(one) for key, one in kind.items()}
    if isinstance(kind, list):
        return [schema(*kind)]
    if origin in (list, tuple):
        return [schema(arguments[0])]
    if origin is dict:
        return {ANY: schema(arguments[1])}
    if origin in (Union, types.UnionType):
        first, *rest = map(schema, arguments)
        return " or ".join([first, *rest]) if isinstance(first, str) else first
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return schema(get_type_hints(kind))
    assert isinstance(kind, type)
    return next(name for plain, name in _PLAIN.items() if issubclass(kind, plain))


def faults(value: object, wanted: Any, place: str = "") -> list[str]:
    """Return where a ``value`` from JSON is not as its schema says."""
    if isinstance(wanted, list):
        return [
            fault
            for number, one in enumerate(value if isinstance(value, list) else [value])
            for fault in faults(one, wanted[0], f"{place}[{number}]")
        ]
    if isinstance(wanted, dict):
        if value is None:  # of a class that may be missing
            return []
        if not isinstance(value, dict):
            return [place]
        if ANY in wanted:
            wanted = dict.fromkeys(value, wanted[ANY])
        known = {key.removesuffix(OPTIONAL): one for key, one in wanted.items()}
        needed = {key for key in wanted if not key.endswith(OPTIONAL)}
        found = [f"{place}.{key}" for key in {*value} ^ {*known} if key in needed or key in value]
        both = [key for key in known if key in value]
        return found + [x for key in both for x in faults(value[key], known[key], f"{place}.{key}")]
    name = _PLAIN[type(value)]
    fits = name in wanted.split(" or ") or (name == "integer" and wanted == "number")
    return [] if fits else [f"{place}: {name}"]
