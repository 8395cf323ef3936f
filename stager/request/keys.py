"""Describe the keys of stage.toml, by what stands below each of them in `policy`.

pydantic could read that too, but would do so whenever `policy` is imported, which takes 25 ms.
"""

from __future__ import annotations

import ast
import inspect
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from stager.request import policy
from stager.request.policy import Place, Policy

if TYPE_CHECKING:
    from collections.abc import Iterator

_MIB, _TIB = 1 << 20, 1 << 40


class Key(NamedTuple):
    """A key, its value by default as it is written in the file, and the paragraphs about it.

    The first paragraph says what the key is. A key of a table in ``roots`` may have no default.
    """

    name: str
    default: str
    text: tuple[str, ...]


class Table(NamedTuple):
    """A table of stage.toml, or what precedes all tables, whose name is empty."""

    name: str
    title: str
    keys: tuple[Key, ...]


def tables() -> list[Table]:
    """Return all that stage.toml may have, in the order of `Policy`."""
    texts = _texts()
    defaults = Policy(roots=("/nvme",)).model_dump(mode="json", by_alias=True)
    defaults["roots"] = ["/nvme"]
    inner = {
        name: field.annotation
        for name, field in Policy.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
    top = [*_keys(Policy, defaults, texts, without=inner)]
    found = [Table("", "", tuple(top))]
    for name, model in inner.items():
        title = (model.__doc__ or "").partition(": ")[2]
        keys = tuple(_keys(model, defaults[name], texts))
        found.append(Table(name, f"{title[:1].upper()}{title[1:]}", keys))
    return found


def place_keys() -> tuple[Key, ...]:
    """Return the keys of a table in ``roots``."""
    first, *others = _keys(Place, Place(path="/nvme").model_dump(), _texts())
    return first._replace(default=""), *others


def _keys(
    model: type[BaseModel],
    defaults: dict[str, Any],
    texts: dict[tuple[str, str], str],
    without: Any = (),
) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        if name not in without:
            key = field.alias or name
            paragraphs = texts[model.__name__, name].split("\n\n")
            text = tuple(" ".join(paragraph.split()) for paragraph in paragraphs)
            yield Key(key, _in_toml(defaults[key]), text)


def _in_toml(value: object) -> str:
    """Return a value as stage.toml has it."""
    if isinstance(value, int) and value and value % _MIB == 0:
        return f'"{value // _TIB}TiB"' if value % _TIB == 0 else f'"{value // _MIB}MiB"'
    if isinstance(value, float) or (isinstance(value, str) and value.isdecimal()):
        return f"{float(value):g}"
    return json.dumps(value)


def _texts() -> dict[tuple[str, str], str]:
    """Return the text below each field of the classes in `policy`, by class and field."""
    return {
        (kind.name, field.target.id): text.value.value
        for kind in ast.walk(ast.parse(inspect.getsource(policy)))
        if isinstance(kind, ast.ClassDef)
        for field, text in zip(kind.body, kind.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }
