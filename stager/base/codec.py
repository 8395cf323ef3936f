"""Turn values into JSON and back, for what travels between processes or lies on disk. Pure.

JSON holds lists, texts and numbers alone. Which class they become is said by the receiver's types
and never by the text, so a text cannot choose what is called. What is not of the exact shape is
refused with a ValueError: whoever wrote it may be another user, node or version.

>>> from typing import NamedTuple
>>> class Point(NamedTuple):
...     x: int
...     y: float
>>> codec_of(Point).encode(Point(1, 2.0))
b'[1,2.0]'
>>> codec_of(Point).decode(b'[1, true]')
Traceback (most recent call last):
ValueError: y is not float
"""

from __future__ import annotations

import binascii
import json
from dataclasses import dataclass, is_dataclass
from enum import StrEnum
from functools import cache, partial
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    TypeGuard,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

#: The range of an integer: those of the kernel have 64 bits, with a sign or without.
_LEAST, _MOST = -(1 << 63), 1 << 64


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an integer of 64 bits: with longer ones, arithmetic may fail.

    >>> is_integer(1 << 63), is_integer(1 << 64), is_integer(True), is_integer(1.0)
    (True, False, False, False)
    """
    return type(value) is int and _LEAST <= value < _MOST


def listed_time(nanoseconds: int) -> int:
    """Return a file's time, or the nearest one that listings and records hold, of 1677 to 2262.

    >>> listed_time(10**18), listed_time(10**19)
    (1000000000000000000, 9223372036854775807)
    """
    return min(max(nanoseconds, -(1 << 63)), (1 << 63) - 1)


#: A size, a number of things or a time since 1970; and a file's time, which may be older.
Count = Annotated[int, lambda value: 0 <= value < _MOST]
Time = Annotated[int, lambda value: value == listed_time(value)]
#: A text of at most as many characters as the longest path that the kernel takes has bytes.
Short = Annotated[str, lambda value: len(value) <= 4096]


T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
E = TypeVar("E", bound=StrEnum)


class _WrongError(ValueError):
    """A value that is none of its type; ``text`` has {} for the name of the field it stands in."""

    def __init__(self, text: str) -> None:
        super().__init__(text.format("it"))
        self.text = text


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """``to_data`` turns a value into JSON data; ``from_data`` checks such data and rebuilds it."""

    to_data: Callable[[T], Any]
    from_data: Callable[[Any], T]

    def encode(self, value: T) -> bytes:
        """Return the message that stands for ``value``."""
        return _ENCODER.encode(self.to_data(value)).encode("ascii")

    def decode(self, message: bytes | memoryview) -> T:
        """Return the value that the message stands for. Raise ValueError if it is of no use."""
        try:
            data = _DECODER.decode(str(message, "ascii"))
        except RecursionError:
            raise ValueError("nested too deeply") from None
        return self.from_data(data)


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _same(value: T) -> T:
    return value


def _plain(kind: type[T], is_valid: Callable[[T], bool] | None = None) -> Codec[T]:
    """Return the codec of a value that JSON has, if the check holds."""

    def from_data(data: Any) -> T:
        if type(data) is not kind:
            raise _WrongError(f"{{}} is not {kind.__name__}")
        if is_valid and not is_valid(data):
            raise _WrongError("the value of {} is not valid")
        return data

    return Codec(_same, from_data)


def _list(data: Any, length: int | None = None) -> list[Any]:
    if type(data) is not list:
        raise _WrongError("{} is not list")
    if length not in (None, len(data)):
        raise _WrongError("{} has not the expected length")
    return data


#: The value None.
NOTHING: Codec[None] = _plain(NoneType)
TEXT = _plain(str)
NUMBER = _plain(int, is_integer)
#: A finite number.
REAL: Codec[float] = Codec(float, _plain(float, lambda value: value - value == 0.0).from_data)
FLAG = _plain(bool)
BYTES: Codec[bytes] = Codec(
    lambda value: binascii.b2a_base64(value, newline=False).decode("ascii"),
    lambda data: binascii.a2b_base64(TEXT.from_data(data), strict_mode=True),
)


def optional(codec: Codec[T]) -> Codec[T | None]:
    """Return the codec of a value that may be None."""
    return Codec(
        lambda value: None if value is None else codec.to_data(value),
        lambda data: None if data is None else codec.from_data(data),
    )


def list_of(codec: Codec[T]) -> Codec[list[T]]:
    """Return the codec of a list."""
    return Codec(
        lambda values: [codec.to_data(value) for value in values],
        lambda data: [codec.from_data(one) for one in _list(data)],
    )


def tuple_of(codec: Codec[T]) -> Codec[tuple[T, ...]]:
    """Return the codec of a tuple of any length."""
    several = list_of(codec)
    return Codec(
        lambda values: several.to_data(list(values)),
        lambda data: tuple(several.from_data(data)),
    )


def pair_of(first: Codec[A], second: Codec[B]) -> Codec[tuple[A, B]]:
    """Return the codec of a tuple of two."""

    def from_data(data: Any) -> tuple[A, B]:
        one, two = _list(data, 2)
        return first.from_data(one), second.from_data(two)

    return Codec(lambda value: [first.to_data(value[0]), second.to_data(value[1])], from_data)


def dict_of(codec: Codec[T]) -> Codec[dict[str, T]]:
    """Return the codec of a dict whose keys are texts."""

    def from_data(data: Any) -> dict[str, T]:
        if type(data) is not dict:
            raise _WrongError("{} is not dict")
        return {name: codec.from_data(one) for name, one in data.items()}

    return Codec(lambda value: {name: codec.to_data(one) for name, one in value.items()}, from_data)


def member_of(choices: type[E]) -> Codec[E]:
    """Return the codec of a member of an enumeration of texts."""
    text = _plain(str, {*choices}.__contains__)
    return Codec(str, lambda data: choices(text.from_data(data)))


def record_of(shape: Callable[..., T], **codecs: Codec[Any]) -> Codec[T]:
    """Return the codec of a dataclass or NamedTuple as a list, by those of its fields in order."""
    expected: Sequence[str] = shape.__match_args__  # type: ignore[attr-defined]
    if tuple(codecs) != tuple(expected):
        raise TypeError(f"{shape} has the fields {expected}, not {tuple(codecs)}")
    rebuilt = _rebuilder(shape, codecs, range(len(codecs)))
    return Codec(
        lambda value: [codec.to_data(getattr(value, name)) for name, codec in codecs.items()],
        lambda data: rebuilt(_list(data, len(codecs))),
    )


def _object_of(shape: Any, codecs: Mapping[str, Codec[Any]]) -> Codec[Any]:
    """Return the codec of a dataclass as an object that has its exact fields."""
    rebuilt = _rebuilder(shape, codecs, codecs)

    def from_data(data: Any) -> Any:
        if type(data) is not dict or data.keys() != codecs.keys():
            raise ValueError(f"the fields are not those of {shape.__name__}")
        return rebuilt(data)

    return Codec(
        lambda value: {name: codec.to_data(getattr(value, name)) for name, codec in codecs.items()},
        from_data,
    )


def _rebuilder(
    shape: Callable[..., T], codecs: Mapping[str, Codec[Any]], keys: Iterable[Any]
) -> Callable[[Any], T]:
    """Return what makes a ``shape`` of data that has the value of each field at one of ``keys``."""
    readers = [(key, codec.from_data) for key, codec in zip(keys, codecs.values(), strict=True)]

    def rebuilt(data: Any) -> T:
        values: list[Any] = []
        try:
            for key, read in readers:
                values.append(read(data[key]))
        except _WrongError as wrong:
            raise ValueError(wrong.text.format([*codecs][len(values)])) from None
        return shape(*values)

    return rebuilt


def codec_of(shape: type[T]) -> Codec[T]:
    """Return the codec that the annotations of a dataclass, NamedTuple or plain type mean.

    A dataclass is an object, a NamedTuple a list. ``Annotated[int, check]`` is a number for which
    the function ``check`` returns true; likewise a text. Raise TypeError for any other type.
    """
    return _codec_of(shape)  # type: ignore[arg-type]


def row_of(shape: type[T]) -> Codec[T]:
    """Return what `codec_of` does, but each dataclass is a list.

    Without names, a message of all nodes is half as long.
    """
    return _codec_of(shape, named=False)  # type: ignore[arg-type]


@cache
def _codec_of(shape: Any, *, named: bool = True) -> Codec[Any]:
    of = partial(_codec_of, named=named)
    kind, inner = get_origin(shape), get_args(shape)
    if shape in _PLAIN:
        return _PLAIN[shape]
    if kind is Annotated:
        return _plain(*inner)
    if kind is UnionType and len(inner) == 2 and inner[1] is NoneType:
        return optional(of(inner[0]))
    if kind is tuple and inner[1] is not ...:
        return pair_of(*map(of, inner))
    if kind in _SEVERAL:
        return _SEVERAL[kind](of(inner[-1] if kind is dict else inner[0]))
    if isinstance(shape, type) and issubclass(shape, StrEnum):
        return member_of(shape)
    if not hasattr(shape, "__match_args__"):
        raise TypeError(f"there is no codec of {shape}")
    types = get_type_hints(shape, include_extras=True)
    codecs = {name: of(types[name]) for name in shape.__match_args__}
    if named and is_dataclass(shape):
        return _object_of(shape, codecs)
    return record_of(shape, **codecs)


_PLAIN: dict[Any, Codec[Any]] = {
    NoneType: NOTHING, str: TEXT, int: NUMBER, float: REAL, bool: FLAG, bytes: BYTES,
}  # fmt: skip
_SEVERAL: dict[Any, Callable[[Codec[Any]], Codec[Any]]] = {
    list: list_of, tuple: tuple_of, dict: dict_of,
}  # fmt: skip
