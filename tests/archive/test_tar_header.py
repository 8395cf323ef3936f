"""Headers of tars: fields, numbers and checksums."""

from __future__ import annotations

import struct
import tarfile

import pytest

from stager.archive.damage import DamagedError
from stager.archive.tar import TypeFlag, decimal, decode_header, number, text
from tests.support.archives import header

BAD_NUMBER = "a header has a number that cannot be read"


def test_a_header_is_decoded_field_by_field() -> None:
    member = tarfile.TarInfo(f"{'d' * 90}/{'f' * 90}")
    member.mode, member.size, member.mtime = 0o755, 600, 1_700_000_000
    found = decode_header(member.tobuf(tarfile.USTAR_FORMAT))
    assert found.path == member.name.encode()
    assert found.type is TypeFlag.FILE
    assert [number(field) for field in (found.mode, found.size, found.mtime)] == [
        0o755, 600, 1_700_000_000,
    ]  # fmt: skip
    assert text(found.target) == b""


@pytest.mark.parametrize("flag", TypeFlag)
def test_the_type_of_a_header_is_known_by_its_flag(flag: TypeFlag) -> None:
    block = header("a", 0, flag.value or b"6")
    assert decode_header(block).type is flag


def test_gnu_headers_have_no_prefix() -> None:
    block = bytearray(header("a", 0))
    block[345:349] = b"1234"  # a time in this format
    assert decode_header(_summed(block)).path == b"a"


@pytest.mark.parametrize("signed", [False, True])
def test_bytes_may_be_added_up_as_signed_or_unsigned(*, signed: bool) -> None:
    block = bytearray(header("\xe9t\xe9", 0))
    assert decode_header(_summed(block, signed=signed)).path == "\xe9t\xe9".encode()
    block[0] ^= 1
    with pytest.raises(DamagedError, match="a member's header is not valid"):
        decode_header(bytes(block))


def _summed(block: bytearray, *, signed: bool = False) -> bytes:
    block[148:156] = b" " * 8
    total = sum(struct.unpack("512b" if signed else "512B", block))
    block[148:156] = b"%06o\0 " % total
    return bytes(block)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (b"0000644\0", 0o644), (b"   644 \0", 0o644), (b"", 0), (b"\0" * 8, 0), (b" " * 8, 0),
        (b"\x80" + (1 << 40).to_bytes(11, "big"), 1 << 40), (b"\xff" * 12, -1),
        (b"\xff" + bytes(11), -(1 << 88)),
    ],
)  # fmt: skip
def test_numbers_are_octal_or_binary(field: bytes, value: int) -> None:
    assert number(field.ljust(8, b"\0")) == value


@pytest.mark.parametrize("field", [b"0000648\0", b"-000644\0", b"+000644\0", b"abc\0\0\0\0\0"])
def test_other_numbers_are_damage(field: bytes) -> None:
    with pytest.raises(DamagedError) as caught:
        number(field)
    assert str(caught.value) == BAD_NUMBER


@pytest.mark.parametrize("digits", [b"", b"-1", b"+1", b" 1", b"1_0", b"1" * 21])
def test_records_hold_decimal_numbers_of_at_most_20_digits(digits: bytes) -> None:
    assert decimal(b"1" * 20) == int("1" * 20)
    with pytest.raises(DamagedError) as caught:
        decimal(digits)
    assert str(caught.value) == BAD_NUMBER
