"""Make hostile variants of a valid text: what a broken or malicious writer might leave."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Values that take the place of a value in JSON, one after the other.
_VALUES: tuple[Any, ...] = (
    None, True, -1, 1 << 64, 10**400, 0.5, "", "\0", "\x1b[2J\n", "x" * 100_000, "../../etc/passwd",
    [], [[]] * 1000, {}, {"a": {"b": {}}}, "\udcff",
)  # fmt: skip
#: Texts that are hostile whatever was expected.
_TEXTS = (
    b"", b"\0" * 4096, b"\xff" * 4096, b"[" * 100_000, b'{"a":' * 100_000, b"NaN", b"Infinity",
    b"1" * 100_000, b"\n" * 100_000, b"null", b"{}", b"[]",
)  # fmt: skip


def variants(text: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield ``count`` hostile variants of ``text``: cut, changed, repeated, or replaced."""
    source = random.Random(seed)
    changes = (_cut, _flip, _insert, _repeat, _inflate)
    yield from _TEXTS
    for number in range(count - len(_TEXTS)):
        yield changes[number % len(changes)](text, source)


def json_variants(text: str, count: int, seed: int = 0) -> Iterator[str]:
    """Yield ``count`` variants of a JSON text in which one value or key is another one."""
    source = random.Random(seed)
    whole = json.loads(text)
    for number in range(count):
        copy = json.loads(text)
        places = list(_places(copy))
        put, drop = places[source.randrange(len(places))]
        if number % 5 == 4:
            drop()
        else:
            put(_VALUES[number % len(_VALUES)])
        assert copy != whole or number % 5 != 4
        yield json.dumps(copy)


def _places(data: Any) -> Iterator[tuple[Callable[[Any], None], Callable[[], None]]]:
    """Yield for each value in ``data`` what replaces it and what removes it."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in list(keys):

        def put(value: Any, key: Any = key) -> None:
            data[key] = value

        def drop(key: Any = key) -> None:
            del data[key]

        yield put, drop
        yield from _places(data[key])


def _cut(text: bytes, source: random.Random) -> bytes:
    return text[: source.randrange(len(text))]


def _flip(text: bytes, source: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(source.randint(1, 8)):
        changed[source.randrange(len(text))] = source.randrange(256)
    return bytes(changed)


def _insert(text: bytes, source: random.Random) -> bytes:
    at = source.randrange(len(text))
    return text[:at] + source.randbytes(source.randint(1, 64)) + text[at:]


def _repeat(text: bytes, source: random.Random) -> bytes:
    return text * source.randint(2, 5)


def _inflate(text: bytes, source: random.Random) -> bytes:
    """Put eight bytes that read as a huge number in the place of others."""
    at = source.randrange(max(1, len(text) - 8))
    return text[:at] + source.choice((b"\xff" * 8, b"\x7f" + b"\xff" * 7)) + text[at + 8 :]
