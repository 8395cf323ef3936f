"""One table of options: what the fields of Options say is what JSON and messages carry."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from stager.base.options import (
    DEFAULT_OPTIONS,
    ITSELF,
    OPTION_TYPES,
    FolderLayout,
    Lifetime,
    Links,
    Mode,
    Options,
    Relocate,
    Share,
    Validate,
    Verify,
    Via,
)

ALL = Options(
    validate=Validate.ALWAYS,
    verify=Verify.READBACK,
    lifetime=Lifetime.JOB,
    relocate=Relocate.NO,
    include=("*.py", "lib/"),
    exclude=("x,y",),
    extract=True,
    decompress=("*.gz", "b"),
    mode=Mode.SHARD,
    by="part-{n}",
    via=Via.LINK,
    name="weights",
)


def test_the_type_of_an_option_is_that_of_its_default() -> None:
    assert {
        "validate": Validate,
        "verify": Verify,
        "lifetime": Lifetime,
        "relocate": Relocate,
        "include": tuple,
        "exclude": tuple,
        "extract": bool,
        "decompress": tuple,
        "mode": Mode,
        "by": str,
        "share": Share,
        "layout": FolderLayout,
        "links": Links,
        "replace": bool,
        "via": Via,
        "as": str,
    } == OPTION_TYPES


@pytest.mark.parametrize("options", [DEFAULT_OPTIONS, ALL, Options(extract=True)])
def test_options_are_read_back_from_their_json(options: Options) -> None:
    again = Options.from_json(json.loads(json.dumps(options.to_json())))
    assert again == options
    found = [type(getattr(again, option.name)) for option in fields(again)]
    assert found == list(OPTION_TYPES.values())


def test_the_json_has_only_what_differs_from_the_defaults() -> None:
    assert DEFAULT_OPTIONS.to_json() == {}
    assert Options(mode=Mode.SHARD).to_json() == {"mode": "shard"}


@pytest.mark.parametrize(
    ("data", "error"), [({"owner": "x"}, KeyError), ({"mode": "x"}, ValueError)]
)
def test_other_json_is_an_error(data: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        Options.from_json(data)


def test_options_are_given_with_key_and_value_once_for_each_pattern() -> None:
    assert list(ALL.given()) == [
        ("validate", "always"), ("verify", "readback"), ("lifetime", "job"), ("relocate", "no"),
        ("include", "*.py"), ("include", "lib/"), ("exclude", "x,y"), ("extract", ""),
        ("decompress", "*.gz"),
        ("decompress", "b"), ("mode", "shard"), ("by", "part-{n}"), ("via", "link"),
        ("as", "weights"),
    ]  # fmt: skip
    assert list(DEFAULT_OPTIONS.given()) == []


def test_messages_always_show_how_a_copy_is_validated() -> None:
    assert str(DEFAULT_OPTIONS) == "validate=stat"
    assert str(Options(extract=True, mode=Mode.SHARD)) == "validate=stat, extract, mode=shard"


def test_what_is_unpacked_is_made_of_other_bytes() -> None:
    assert Options(extract=True).is_unpacked
    assert Options(decompress=ITSELF).is_unpacked
    assert not Options(mode=Mode.SHARD).is_unpacked
