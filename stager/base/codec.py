"""Check numbers that other users or nodes wrote, and bound times. Pure.

Encode values as JSON, and rebuild them as the receiver expects them. Pure.

A message holds lists, texts and numbers alone. Which class they become is said by the codec of the
receiver and never by the message, so a message cannot choose what is called. A codec raises
ValueError for everything that is not of its exact shape.
"""

from __future__ import annotations

import binascii
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeGuard, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from enum import StrEnum

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


T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
E = TypeVar("E", bound="StrEnum")


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


def _nothing(data: Any) -> None:
    if data is not None:
        raise ValueError("there is a value where none is expected")


def _text(data: Any) -> str:
    if type(data) is not str:
        raise ValueError("it is no text")
    return data


def _number(data: Any) -> int:
    if not is_integer(data):
        raise ValueError("it is no integer of 64 bits")
    return data


def _real(data: Any) -> float:
    if type(data) is not float or data - data != 0.0:
        raise ValueError("it is no finite number")
    return data


def _flag(data: Any) -> bool:
    if type(data) is not bool:
        raise ValueError("it is neither true nor false")
    return data


def _list(data: Any, length: int | None = None) -> list[Any]:
    if type(data) is not list or length not in (None, len(data)):
        raise ValueError("it is no list of the expected length")
    return data


#: The value None.
NOTHING: Codec[None] = Codec(_nothing, _nothing)
TEXT: Codec[str] = Codec(_same, _text)
NUMBER: Codec[int] = Codec(_same, _number)
REAL: Codec[float] = Codec(float, _real)
FLAG: Codec[bool] = Codec(_same, _flag)
BYTES: Codec[bytes] = Codec(
    lambda value: binascii.b2a_base64(value, newline=False).decode("ascii"),
    lambda data: binascii.a2b_base64(_text(data), strict_mode=True),
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


def member_of(choices: type[E]) -> Codec[E]:
    """Return the codec of a member of an enumeration of texts."""
    return Codec(str, lambda data: choices(_text(data)))


def record_of(shape: Callable[..., T], **codecs: Codec[Any]) -> Codec[T]:
    """Return the codec of a dataclass or NamedTuple, given the codec of each field in order."""
    expected: Sequence[str] = shape.__match_args__  # type: ignore[attr-defined]
    if tuple(codecs) != tuple(expected):
        raise TypeError(f"{shape} has the fields {expected}, not {tuple(codecs)}")

    def from_data(data: Any) -> T:
        parts = zip(codecs.values(), _list(data, len(codecs)), strict=True)
        return shape(*(codec.from_data(part) for codec, part in parts))

    return Codec(
        lambda value: [codec.to_data(getattr(value, name)) for name, codec in codecs.items()],
        from_data,
    )
