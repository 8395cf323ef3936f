"""Values survive their way as messages; what is not of the expected shape is refused."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stager.base.codec import (
    BYTES,
    FLAG,
    NOTHING,
    NUMBER,
    REAL,
    TEXT,
    Codec,
    list_of,
    member_of,
    optional,
    pair_of,
    record_of,
    row_of,
)


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


class Point(NamedTuple):
    x: int
    y: float


@dataclass(frozen=True, slots=True)
class Thing:
    name: str
    colour: Colour | None
    data: bytes = b""
    points: tuple[Point, ...] = ()
    old: bool = False


THING = row_of(Thing)
CODEC = list_of(pair_of(optional(THING), NUMBER))
NUMBERS = st.integers(-(2**63), 2**64 - 1)
REALS = st.floats(allow_nan=False, allow_infinity=False)
THINGS = st.builds(
    Thing,
    # Names of files may be any bytes: Python holds some as lone surrogates.
    name=st.binary().map(lambda name: name.decode(errors="surrogateescape")) | st.text(),
    colour=st.none() | st.sampled_from(Colour),
    data=st.binary(),
    points=st.lists(st.builds(Point, NUMBERS, REALS), max_size=3).map(tuple),
    old=st.booleans(),
)
VALUES = st.lists(st.tuples(st.none() | THINGS, NUMBERS), max_size=4)


@given(VALUES)
def test_a_value_is_rebuilt_as_it_was(values: list[tuple[Thing | None, int]]) -> None:
    message = CODEC.encode(values)
    assert message.isascii()
    assert CODEC.decode(message) == values
    assert CODEC.decode(memoryview(message)) == values


def test_the_message_has_no_names_of_classes() -> None:
    values: list[tuple[Thing | None, int]] = [(Thing("a", Colour.RED, b"\0", (Point(1, 2.0),)), 7)]
    assert CODEC.encode(values) == b'[[["a","red","AA==",[[1,2.0]],false],7]]'


WRONG: dict[str, tuple[Codec[Any], list[str]]] = {
    "nothing": (NOTHING, ["0", "[]", "false", '""']),
    "text": (TEXT, ["0", "null", '["a"]', '{"a":1}', '"a', "a"]),
    "number": (NUMBER, ["1.0", "true", "null", '"1"', str(2**64), str(-(2**63) - 1), "1" * 5000]),
    "real": (REAL, ["1", "NaN", "Infinity", "-Infinity", "1e999", '"1.0"', "null"]),
    "flag": (FLAG, ["0", "1", '"true"', "null"]),
    "bytes": (BYTES, ['"A"', '"AA"', '"A A="', '"\\u00e9"', "0", '"AA==AA=="']),
    "list": (list_of(NUMBER), ["{}", '{"0":1}', '"ab"', "[null]", "[1,[2]]", "1", "[1"]),
    "pair": (pair_of(NUMBER, TEXT), ["[]", "[1]", '[1,"a",2]', '["a",1]', '{"0":1,"1":"a"}']),
    "member": (member_of(Colour), ['"blue"', '"RED"', "0", "null", "[]", "{}"]),
    "record": (THING, ["[]", '["a"]', '["a","red","","",false]', '{"name":"a"}', '"Thing"']),
    "optional": (optional(NUMBER), ['"a"', "[]", "false"]),
    "deep": (TEXT, ["[" * 100_000, '{"a":' * 100_000]),
    "empty": (TEXT, ["", " ", "\0"]),
}


@pytest.mark.parametrize(
    ("codec", "text"), [(codec, text) for codec, texts in WRONG.values() for text in texts]
)
def test_what_has_another_shape_is_refused(codec: Codec[Any], text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own messages too
        codec.decode(text.encode())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
)


@given(st.binary(max_size=300) | JSON.map(lambda data: json.dumps(data).encode()))
@example(b'[[["a","red","AA==",[[1,2.0]],false],7],[')
@example(b"\x80\x04\x95\x1f\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.")
def test_hostile_bytes_are_refused_or_are_a_value(text: bytes) -> None:
    with suppress(ValueError):
        assert CODEC.decode(CODEC.encode(CODEC.decode(text))) == CODEC.decode(text)


@pytest.mark.parametrize("text", ["[" + "[]," * 100_000 + "[]]", "[" + "0," * 300_000 + "0]"])
def test_a_message_grows_only_by_a_limited_factor(text: str) -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"^it (is not list|has not the expected length)$"):
        CODEC.decode(text.encode())
    assert tracemalloc.get_traced_memory()[1] < 40 * len(text)
    tracemalloc.stop()


def test_no_field_of_a_record_is_forgotten() -> None:
    with pytest.raises(TypeError, match="has the fields"):
        record_of(Point, x=NUMBER)
    with pytest.raises(TypeError, match="has the fields"):
        record_of(Point, y=REAL, x=NUMBER)
