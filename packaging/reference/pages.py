"""Say which pages the reference has, and make each of them."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from inspect import cleandoc
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from stager.cli.main import COMMANDS, cli
from stager.cli.topics import TOPICS, Section
from stager.node.metrics import COUNTERS, GAUGES
from stager.request.keys import tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_REPOSITORY = Path(__file__).parents[2]
FOLDER = _REPOSITORY / "slurm-config/docs/reference"
TEMPLATE = _REPOSITORY / "slurm-config/stage.toml"
_SCHEMAS = _REPOSITORY / "tests/cli/json"
#: The columns of a line.
_COLUMNS = 118
#: Options that so many commands have stand on the page once.
_SEVERAL = 3


def _page(title: str, *texts: str) -> str:
    return "\n\n".join((f"# {title}", *filter(None, texts))) + "\n"


def _paragraphs(text: str) -> str:
    """Return paragraphs in lines of a page."""
    parts = cleandoc(text).split("\n\n")
    return "\n\n".join(_filled(part) for part in parts)


def _filled(text: str) -> str:
    return fill(" ".join(text.split()), _COLUMNS, break_long_words=False, break_on_hyphens=False)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {_term(term)} | {_cell(text)} |" for term, text in rows]
    return "\n".join(["| name | meaning |", "|---|---|", *lines]) if lines else ""


def _term(term: str) -> str:
    """Return a term as what is typed: ``-w, --nodes NODES`` is two of them."""
    parts = [term] if "=" in term else term.split(", ")
    return ", ".join(f"`{_cell(part)}`" for part in parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _sections(sections: Iterable[Section]) -> str:
    parts: list[str] = []
    for title, text, rows in sections:
        parts += [f"## {title}" if title else "", _paragraphs(text), _table(rows)]
    return "\n\n".join(filter(None, parts))


def _topic(name: str) -> str:
    return _sections(TOPICS[name][1]())


def _codes() -> str:
    """Return the sections of the codes, each with its meaning in bold."""
    parts: list[str] = []
    for section in TOPICS["codes"][1]():
        first, *more = section.paragraphs
        title = [f"## {section.title}"] if section.title else []
        parts += [*title, *([f"**{first}**"] if title else [_filled(first)]), *map(_filled, more)]
    return "\n\n".join(parts)


_STAGECTL = """
    `stagectl COMMAND -h` is a short help with all options of a command, `--help` a full one. In
    bash, zsh and fish, Tab completes commands, options, nodes, copies and SRC:DST. See also
    [directives](directives.md) and [exit codes](exit-codes.md).
    """


def _stagectl() -> str:
    context = click.Context(cli, info_name="stagectl", **cli.context_settings)
    commands = {
        name: cli.get_command(context, name) for name, (_, line) in COMMANDS.items() if line
    }
    contexts = {
        name: click.Context(command, info_name=name, parent=context)
        for name, command in commands.items()
        if command
    }
    records = {name: dict(_records(within)) for name, within in contexts.items()}
    often = Counter(record for options in records.values() for record in options.items())
    several = {record: number for record, number in often.items() if number >= _SEVERAL}
    parts = [_paragraphs(_STAGECTL), "## Options of several commands"]
    parts += [_table(several), _paragraphs(next(TOPICS["nodes"][1]()).text)]
    for name, within in contexts.items():
        own = [record for record in records[name].items() if record not in several]
        usage = " ".join(within.command.collect_usage_pieces(within))
        parts += [f"## stagectl {name}", f"```\n{within.command_path} {usage}\n```"]
        parts += [_paragraphs(within.command.help or ""), _table(own)]
    return _page("stagectl", *parts)


#: How click names the numbers that an option takes, behind its text.
_RANGE = re.compile(r"\[(\d+<=x<=\d+|x>=\d+)\]")
#: What every command has.
_HELP = ("-h", "--help")


def _records(context: click.Context) -> Iterator[tuple[str, str]]:
    for option in context.command.get_params(context):
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record and record[0] not in _HELP:
            yield record[0], " ".join(_RANGE.sub("", record[1]).split())


_JSON = """
    With `--json`, a command prints one object with these keys and types. `version` changes when a
    key goes; new ones may come. A key that ends in `?` may be missing, and `*` stands for any key.
    """


def _json() -> str:
    schemas = {path.stem: json.loads(path.read_text()) for path in sorted(_SCHEMAS.iterdir())}
    parts, stage = [_paragraphs(_JSON)], schemas["stage"]
    while schemas:
        schema = next(iter(schemas.values()))
        names = [name for name, other in schemas.items() if other == schema]
        schemas = {name: other for name, other in schemas.items() if other != schema}
        parts.append(f"## {', '.join(names)}")
        if schema != stage and stage.keys() < schema.keys():
            parts.append("All that `stage` has, and:")
            schema = {key: schema[key] for key in schema if key not in stage}
        parts.append(f"```\n{_shown(schema, 0)}\n```")
    return _page("JSON", *parts)


def _shown(value: Any, indent: int) -> str:
    """Return a schema, in one line where it fits."""
    whole = json.dumps(value)
    if indent + len(whole) <= _COLUMNS or not isinstance(value, dict | list):
        return whole
    blanks, (begin, end) = " " * (indent + 1), "{}" if isinstance(value, dict) else "[]"
    if isinstance(value, list):
        inside = [_shown(one, indent + 1) for one in value]
    else:
        inside = [f"{json.dumps(key)}: {_shown(one, indent + 1)}" for key, one in value.items()]
    return f"{begin}\n{blanks}" + f",\n{blanks}".join(inside) + f"\n{' ' * indent}{end}"


_METRICS = """
    `metrics.textfile` in stage.toml names the file, which is replaced after each job that staged. A
    failed stage counts on each node of its job, but not if its ranks did not start. A user's copies
    are counted when a job of that user that staged ends, when `headroom` looks for copies to
    remove, and after a boot.
    """


def _metrics() -> str:
    gauges = [(f'slurm_stage_{name}{{root="…"}}', text) for name, text in GAUGES.items()]
    counters = [(f"slurm_stage_{name}_total", text) for name, text in COUNTERS.items()]
    return _page(
        "Metrics", _paragraphs(_METRICS), "## Gauges, for each staging root", _table(gauges),
        "## Counters, for each node", _table(counters),
    )  # fmt: skip


_INDEX = """
    These pages are made from the code by `make reference`. `man slurm-stage` and `man stagectl`
    have the same, and `stagectl help NAME` explains a command, option, code or key.
    """
_ABOUT = {
    "directives.md": "SRC:DST, names in paths, and all options",
    "stagectl.md": "the commands",
    "exit-codes.md": "what each code means, and what to do",
    "environment.md": "variables that are read and set",
    "stage.toml.md": "the site's configuration, key by key",
    "json.md": "what `--json` prints",
    "metrics.md": "figures for Prometheus",
}


def _index() -> str:
    lines = [f"- [{name.removesuffix('.md')}]({name}): {text}" for name, text in _ABOUT.items()]
    return _page("Reference", _paragraphs(_INDEX), "\n".join(lines))


#: All pages, and how each is made.
PAGES: Mapping[str, Callable[[], str]] = {
    "README.md": _index,
    "directives.md": lambda: _page("Directives", _topic("directives")),
    "stagectl.md": _stagectl,
    "exit-codes.md": lambda: _page("Exit codes", _codes()),
    "environment.md": lambda: _page("Environment", _topic("environment")),
    "stage.toml.md": lambda: _page("stage.toml", _topic("stage.toml")),
    "json.md": _json,
    "metrics.md": _metrics,
}
_HEAD = """
    What slurm-stage may do at this site. Every key but roots shows its default value. Install the
    same file on all login and compute nodes, readable by all users. Sizes are a number of bytes, or
    text such as "50GB" or "2MiB". stage.toml(5) says more of some keys.
    """


def template() -> str:
    """Return the stage.toml that is shipped: each key, what it is, and its default."""
    parts = [_comment(_HEAD)]
    for table in tables():
        keys = (f"{_comment(key.text[0])}\n{key.name} = {key.default}" for key in table.keys)
        parts.append("\n".join(([f"[{table.name}]"] if table.name else []) + [*keys]))
    return "\n\n".join(parts) + "\n"


def _comment(text: str) -> str:
    plain = " ".join(text.replace("`", "").split())
    return fill(
        plain, _COLUMNS, initial_indent="# ", subsequent_indent="# ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def write(*, check: bool) -> int:
    """Write all files that differ from the code; with ``check``, name them and return 1."""
    texts = {FOLDER / name: make() for name, make in PAGES.items()} | {TEMPLATE: template()}
    different = {
        path: text for path, text in texts.items() if not path.exists() or path.read_text() != text
    }
    for path, text in different.items():
        if check:
            sys.stderr.write(f"{path} is not what the code says: run make reference\n")
        else:
            path.write_text(text)
    return int(check and bool(different))
