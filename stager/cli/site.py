"""``stagectl site``: show what the site's stage.toml lets users do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from stager.base.text import bytes_text, folded, printable, seconds_text
from stager.cli.command import Command
from stager.cli.shared_options import config_option, json_option
from stager.cli.terminal import print_json, width

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stager.base.rules import Amount
    from stager.request.policy import Policy

#: The columns before a line's text: those of its longest name, and two more.
_INDENT = 15
#: The values of the option ``share`` that each value of ``allow_share`` permits.
_SHARES = {"none": "not allowed", "group": "group", "all": "group, all"}
#: What of stage.toml concerns users, as pydantic takes it.
_FOR_USERS: dict[str, Any] = {
    "lock_timeout": True, "allow_share": True, "cache": True,
    "shared": True, "shared_fs": {"mount"}, "launch": {"tolerate", "tolerate_limit"},
    "source": {"allow", "endpoints", "insecure_registries", "limit"},
}  # fmt: skip


@click.command(cls=Command, topics=("stage.toml",))
@config_option
@json_option
@click.option("--markdown", is_flag=True, help="Print a page for the site's users, as Markdown.")
def site(config: Path, as_json: bool, markdown: bool) -> None:
    """Show where and what you may stage at this site.

    Shows the folders that DST may be in, the URLs that SRC may be, and the limits. It reads only
    the site's configuration file, so it works on a login node too.
    """
    from stager.request import policy  # neither the help nor completion needs pydantic

    rules = policy.load(config)
    if as_json:
        allowed = rules.model_dump(mode="json", include=_FOR_USERS)
        found = {
            "config": str(config),
            "roots": rules.open_roots,
            "destinations": rules.allowed,
            "variables": rules.variables,
            "hints": rules.hints,
            **allowed,
        }
        print_json(found)
        return
    if markdown:
        click.echo(page(rules), nl=False)
        return
    columns = width()
    for name, text in (*_lines(rules), ("set in", str(config))):
        parts = [printable(text)]
        if columns:
            parts = folded(parts[0], max(1, columns - _INDENT))
        click.echo(f"{name:<{_INDENT}}" + f"\n{'':{_INDENT}}".join(parts))


_PAGE = """\
# Files on every node's own disk

Before a job's script starts, slurm-stage copies what the job asks for from shared storage to the
disk of each of its nodes. The next job there finds it. A line of the script asks for it:

```bash
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --stage=/shared/img.sqsh:{folder}/,as=img
srun apptainer exec $STAGE_img python train.py
```

Before the `:` is the source, SRC, behind it the place on each node, DST. With a `/` at its end, the
copy keeps the source's name. `stagectl check --script FILE` finds mistakes before you submit, and
`man slurm-stage` says what else you can write.

| at this site | |
|---|---|
{rows}
"""
#: What Markdown would take for its own in a cell of a table.
_MARKS = re.compile(r"[\\`*_<|\[]")


def page(rules: Policy) -> str:
    """Return a page for the site's users, in Markdown, with a directive that they may use."""
    texts = ((name, _MARKS.sub(r"\\\g<0>", printable(text))) for name, text in _lines(rules))
    rows = (f"| {name} | {text} |" for name, text in texts)
    return _PAGE.format(folder=printable(_folder(rules)), rows="\n".join(rows))


def _folder(rules: Policy) -> str:
    """Return a folder of a user's own as directives name it, by a variable if the site has one."""
    names = {path: f"${name}" for name, path in rules.variables.items()}
    folder = next((path for path in rules.allowed if path in names), rules.allowed[0])
    is_private = any(f"{folder}/".startswith(f"{root}/") for root in rules.private_roots)
    return names.get(folder) or (folder if is_private else f"{folder}/$USER")


def _lines(rules: Policy) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each line. What is not set has none, unless users may ask."""
    yield "DST beneath", ", ".join(rules.allowed)
    if rules.variables:
        yield "variables", ", ".join(f"${name}: {path}" for name, path in rules.variables.items())
    if rules.hints:
        yield "ask for", ", ".join(f"{root} by {hint}" for root, hint in rules.hints.items())
    if rules.job_roots:
        yield "of one job", f"{', '.join(rules.job_roots)}: the copies there go with the job"
        yield from _store_lines(rules)
    if rules.shared_fs.mount:
        yield "shared:/PATH", "a DST in a filesystem made of the disks of your job's nodes"
    if rules.shared_roots:
        folders = ", ".join(rules.shared_roots)
        yield "for all users", f"{folders}: only the account {rules.shared.owner} stages there"
    yield from _source_lines(rules)
    cache = rules.cache
    kept = f"{_disk_amount(cache.keep_free)} of each disk"
    yield "kept free", kept if cache.keep_free else "nothing"
    if cache.headroom:
        more = f"{_disk_amount(cache.headroom)} more than this are free"
        yield "after a job", f"old copies of any user are removed until {more}"
    if {*rules.roots} - {*rules.private_roots}:
        limit = f"{_disk_amount(cache.user_limit)} of each disk of a node"
        yield "your limit", limit if cache.user_limit else "none"
    size = bytes_text(cache.unpacked_size)
    yield "unpacked", f"up to {size}, and {cache.unpacked_members} members, of one archive"
    yield "share=", _SHARES[rules.allow_share]
    yield (
        "wait",
        f"up to {seconds_text(rules.lock_timeout)} for another job of yours with the same DST",
    )
    launch = rules.launch
    most = f"never more than {launch.tolerate_limit}"
    yield (
        "failing nodes",
        f"{launch.tolerate} of a job's nodes, or as --stage-tolerate says; {most}",
    )


def _store_lines(rules: Policy) -> Iterator[tuple[str, str]]:
    size = rules.cache.size
    most = f"; those of all users take up to {_disk_amount(size)}" if size else ""
    if rules.store:
        yield "store", f"{rules.store} keeps copies of these for your next jobs on the node{most}"


def _source_lines(rules: Policy) -> Iterator[tuple[str, str]]:
    source = rules.source
    yield "SRC", "files and folders that the nodes can read"
    yield "URLs", f"those that begin with {', '.join(source.allow)}" if source.allow else "none"
    if source.endpoints:
        yield "endpoints", f"besides the vendors': {', '.join(source.endpoints)}"
    if source.insecure_registries:
        yield "registries", f"nobody proves who answers: {', '.join(source.insecure_registries)}"
    if source.limit:
        yield "rate of URLs", f"up to {bytes_text(source.limit)}/s for a job (not of images)"


def _disk_amount(amount: Amount) -> str:
    return f"{amount[:-1]} %" if isinstance(amount, str) else bytes_text(amount)
