"""Measure a source, or the disk of this node, for `stagectl bench`, and print a table."""

from __future__ import annotations

import json
import os
import re
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import click

from stager.base.errors import UsageError
from stager.base.loads import Load, Measured, best
from stager.base.text import bytes_text, printable, showable
from stager.cli.console import width
from stager.cli.plot import svg
from stager.cli.staging import space_limits
from stager.cli.tables import table
from stager.copies.room import check_room_to_measure
from stager.launch.credentials import with_credentials
from stager.launch.environment import opening
from stager.source.location import Location, is_url
from stager.source.settings import ENDPOINTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from stager.request.policy import Policy
    from stager.source.load import Target
    from stager.source.settings import RemoteSettings

#: Bytes of blocks: of requests to a store, and of reads and writes of files.
_OF_STORES = (256 << 10, 1 << 20, 8 << 20)
_OF_FILES = (4 << 10, 128 << 10, 1 << 20, 8 << 20)
_THREADS = (1, 4, 16)
_UNITS = {"K": 10, "M": 20, "G": 30}
#: Disks are read and written past the page cache in multiples of this.
_LEAST, _LARGEST, _MOST_THREADS = 4096, 1 << 30, 1024
_HEADERS = ("", "BLOCK", "THREADS", "RATE", "IOPS", "P50", "P99", "RETRIES")


@dataclass(frozen=True, slots=True)
class Sweep:
    """Which loads are tried: each for ``seconds`` at most, and for ``size`` bytes."""

    blocks: tuple[int, ...]
    threads: tuple[int, ...]
    is_random: bool
    seconds: float
    size: int


def measure_source(
    source: str, rules: Policy, sweep: Sweep, plot: Path | None, *, as_json: bool
) -> int:
    """Measure a file, a folder or a URL from here; draw it in ``plot``. Raise StageError."""
    from stager.source.load import open_source

    if is_url(source):
        try:
            location = Location.parse(source)
        except ValueError as error:
            raise UsageError(f"{showable(source)} {error}") from None
        os.environ.update(with_credentials(os.environ, [source]))
        opening(os.environ, [location.scheme])
    target = open_source(source, _settings(source, rules))
    blocks = sweep.blocks or (_OF_STORES if is_url(source) else _OF_FILES)
    sweep = replace(sweep, blocks=blocks)
    return _measure(source, target, sweep, ("read",), plot, as_json=as_json)


def measure_disk(
    root: str, rules: Policy, sweep: Sweep, plot: Path | None, *, as_json: bool
) -> int:
    """Measure the disk of a staging folder on this node; draw it in ``plot``. Raise StageError."""
    from stager.source.load import Disk

    sweep = replace(sweep, blocks=sweep.blocks or _OF_FILES)
    check_room_to_measure(root, sweep.size, space_limits(rules))
    target = Disk(root, sweep.size)
    return _measure(f"the disk of {root}", target, sweep, ("write", "read"), plot, as_json=as_json)


def sizes(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """Return the blocks of a list as ``4K,1M``, in bytes; nothing for an empty one."""
    found = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([0-9]{1,7})([KMG]?)", part)
        size = int(match[1]) << _UNITS.get(match[2], 0) if match else 0
        if not _LEAST <= size <= _LARGEST or size % _LEAST:
            raise click.BadParameter(
                f"{part} is not a size from 4K to 1G that is a multiple of 4K; write 4K,128K,1M"
            )
        found.append(size)
    return tuple(found)


def numbers(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """Return the numbers of a list as ``1,4,16``."""
    parts = [part for part in text.split(",") if part]
    if not all(re.fullmatch("[0-9]{1,4}", part) for part in parts):
        raise click.BadParameter(f"{text} is not a list of numbers; write 1,4,16")
    found = tuple(map(int, parts)) or _THREADS
    if not all(1 <= one <= _MOST_THREADS for one in found):
        raise click.BadParameter(f"{text} has a number that is not from 1 to {_MOST_THREADS}")
    return found


def _settings(source: str, rules: Policy) -> RemoteSettings:
    """Return the site's settings for URLs; who measures a server without TLS has chosen it."""
    settings = rules.source.settings
    endpoints = (os.environ.get(name, "") for names in ENDPOINTS.values() for name in names)
    if any(url.startswith("http://") for url in (source, *endpoints)):
        return replace(settings, allow_http=True)
    return settings


def _measure(
    name: str,
    target: Target,
    sweep: Sweep,
    kinds: Sequence[str],
    plot: Path | None,
    *,
    as_json: bool,
) -> int:
    from stager.source.load import measure

    with closing(target):
        found = [measure(target, load, sweep.seconds, sweep.size) for load in _loads(sweep, kinds)]
    if plot:
        plot.write_text(_plotted(name, found))
    if as_json:
        rows = [{**asdict(one), "rate": one.rate, "iops": one.iops} for one in found]
        click.echo(json.dumps({"measured": rows, "direct": target.is_direct}, indent=1))
        return 0
    for line in _lines(name, target, sweep, found):
        click.echo(printable(line))
    return 0


def _plotted(name: str, found: Sequence[Measured]) -> str:
    """Return the picture of what was measured."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for one in found:
        kind = f"{one.what}, {_threads(one.threads)}"
        lines.setdefault(kind, []).append((one.block, one.rate))
    return svg(printable(name), "size of the block", lines, {})


def _loads(sweep: Sweep, kinds: Sequence[str]) -> Iterator[Load]:
    for what in kinds:
        for block in sweep.blocks:
            for threads in sweep.threads:
                yield Load(what, block, threads, sweep.is_random)


def _lines(name: str, target: Target, sweep: Sweep, found: Sequence[Measured]) -> Iterator[str]:
    count = len(target.sizes)
    files = f"{count} files, " if count > 1 else ""
    order = "in random order" if sweep.is_random else "in order"
    yield (
        f"{name}: {files}{bytes_text(sum(target.sizes))}, {order}; each row for at most "
        f"{sweep.seconds:g} s or {bytes_text(sweep.size)}"
    )
    if not target.is_direct:
        yield "this filesystem cannot be read past the page cache, so some rates may be of memory"
    yield from table(_HEADERS, [_row(one) for one in found], width())
    for what in dict.fromkeys(one.what for one in found):
        yield _verdict([one for one in found if one.what == what])


def _row(one: Measured) -> tuple[str, ...]:
    return (
        one.what, bytes_text(one.block), str(one.threads), _rate(one.rate), f"{one.iops:.0f}",
        _milliseconds(one.p50), _milliseconds(one.p99), str(one.retries),
    )  # fmt: skip


def _verdict(found: Sequence[Measured]) -> str:
    """Return what is fastest, and how many threads are enough."""
    fastest, enough = best(found)
    text = f"{fastest.what}: fastest is {_rate(fastest.rate)} with {_ways(fastest)}"
    if enough == fastest:
        return text
    return f"{text}; {_ways(enough)} reach {enough.rate / fastest.rate:.0%} of it"


def _ways(one: Measured) -> str:
    return f"{_threads(one.threads)} and blocks of {bytes_text(one.block)}"


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


def _rate(rate: float) -> str:
    """Return a rate in decimal units, as vendors of networks and disks use them."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.1f} MB/s"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
