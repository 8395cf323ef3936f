"""Draw rates by size as an SVG: points in, text out. Pure.

Measure a source, or the disk of this node, for `stagectl bench`, and print a table.

``stagectl bench``: measure the network, the disks and the source of a job's nodes.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from math import ceil, floor, log2, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import click

from stager.base.errors import PolicyRefusal, UsageError
from stager.base.options import Options
from stager.base.outcome import NodeRates, Rate
from stager.base.text import bytes_text, elided, printable, showable
from stager.cli.arguments import absolute
from stager.cli.complete import files, roots
from stager.cli.options import epilog, json_option, load_policy, run_options
from stager.cli.render import named_rate, node_lines, rate_lines
from stager.cli.staging import build_request, find_nodes, print_outcome, same_line, space_limits
from stager.cli.tables import table
from stager.cli.terminal import complain, say, width
from stager.launch.credentials import with_credentials
from stager.launch.environment import opening
from stager.rank.load import Load, Measured, best
from stager.request.items import StageItem
from stager.source.endpoints import ENDPOINTS
from stager.source.location import Location, is_url
from stager.store.space import check_room_to_measure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    #: By what a line stands for, its points: bytes of a message or block, and bytes a second.
    Lines = Mapping[str, Sequence[tuple[int, float]]]
    from collections.abc import Sequence

    from stager.cli.on_hosts import HostNodes
    from stager.cli.options import RunOptions
    from stager.cli.staging import JobNodes, SimulatedNodes
    from stager.rank.load import Target
    from stager.request.policy import Policy
    from stager.source.endpoints import RemoteSettings

#: Pixels: the picture, and within it the area of the lines. The legend is to the right of that.
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM, _BELOW = 760, 72, 520, 44, 340, 60
_ROW = 20
#: Colours that most people tell apart (Okabe and Ito, Color Universal Design, 2008).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
#: Where there are more lines than colours, the next ones are broken.
_DASHES = ("none", "8 4", "2 3")
_MOST_LABELS, _STEPS = 8, 5
_PLOT_UNITS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))


def svg(title: str, across: str, lines: Lines, limits: Mapping[str, float]) -> str:
    """Return a picture of each line, and of each limit as a broken line across.

    ``across`` says what the sizes are of. A limit is a rate that depends on no size. Sizes are on a
    logarithmic axis, rates on a linear one that begins with 0.
    """
    sizes = sorted({size for points in lines.values() for size, _ in points})
    rates = [rate for points in lines.values() for _, rate in points]
    scale = _Scale(sizes, max([*rates, *limits.values()], default=0.0))
    height = max(_BOTTOM + _BELOW, _TOP + _ROW * (len(lines) + len(limits) + 1))
    box = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text((_LEFT + _WIDTH) / 2, 22, elided(title, 90), size=14),
        *_axes(scale, sizes, across),
    ]
    row = _TOP + _ROW / 2
    kinds = cycle((colour, dash) for dash in _DASHES for colour in _COLOURS)
    for (name, points), (colour, dash) in zip(lines.items(), kinds, strict=False):
        style = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}" fill="none"'
        places = [(scale.x(size), scale.y(rate)) for size, rate in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" {style}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        parts += _legend(row, name, style)
        row += _ROW
    for name, rate in limits.items():
        style = 'stroke="#555555" stroke-dasharray="6 4"'
        y = scale.y(rate)
        parts.append(_rule(_LEFT, y, _RIGHT, y, style))
        parts.append(_text(_LEFT + 4, y - 4, name, "start"))
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """Where sizes and rates are in the picture, and the unit of the rates."""

    def __init__(self, sizes: Sequence[int], highest: float) -> None:
        self._first, self._last = (log2(sizes[0]), log2(sizes[-1])) if sizes else (0.0, 0.0)
        self.factor, self.unit = next(
            ((factor, unit) for factor, unit in _PLOT_UNITS if highest >= factor), _PLOT_UNITS[-1]
        )
        self.step = _round_step(highest / self.factor / _STEPS)
        self.steps = max(1, ceil(highest / self.factor / self.step))

    def x(self, size: int) -> float:
        if self._first == self._last:
            return (_LEFT + _RIGHT) / 2
        return _LEFT + (_RIGHT - _LEFT) * (log2(size) - self._first) / (self._last - self._first)

    def y(self, rate: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * rate / self.factor / (self.steps * self.step)


def _round_step(least: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least ``least``.

    >>> _round_step(0.21), _round_step(3), _round_step(0)
    (0.5, 5.0, 1.0)
    """
    if least <= 0:
        return 1.0
    power = 10.0 ** floor(log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)


def _axes(scale: _Scale, sizes: Sequence[int], across: str) -> Iterator[str]:
    for step in range(scale.steps + 1):
        rate = step * scale.step
        y = scale.y(rate * scale.factor)
        yield _rule(_LEFT, y, _RIGHT, y, 'stroke="#dddddd"')
        yield _text(_LEFT - 8, y + 4, f"{rate:g}", "end")
    every = ceil(len(sizes) / _MOST_LABELS)
    for size in sizes[::every] if sizes else ():
        x = scale.x(size)
        yield _rule(x, _BOTTOM, x, _BOTTOM + 5, 'stroke="black"')
        yield _text(x, _BOTTOM + 20, bytes_text(size).replace(".0 ", " "))
    yield _rule(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, 'stroke="black"')
    yield _rule(_LEFT, _TOP, _LEFT, _BOTTOM, 'stroke="black"')
    yield _text((_LEFT + _RIGHT) / 2, _BOTTOM + 44, across)
    middle = (_TOP + _BOTTOM) / 2
    yield (
        f'<text transform="translate(18 {middle:.1f}) rotate(-90)" text-anchor="middle">'
        f"rate in {scale.unit}</text>"
    )


def _legend(y: float, name: str, style: str) -> list[str]:
    return [
        _rule(_RIGHT + 20, y, _RIGHT + 48, y, style),
        _text(_RIGHT + 56, y + 4, elided(name, 26), "start"),
    ]


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{escape(text)}</text>"


def _rule(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


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
    from stager.rank.load import open_source

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
    from stager.rank.load import Disk

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
    from stager.rank.load import measure

    with closing(target):
        found = [measure(target, load, sweep.seconds, sweep.size) for load in _loads(sweep, kinds)]
    if plot:
        plot.write_text(_plotted_here(name, found))
    if as_json:
        rows = [{**asdict(one), "rate": one.rate, "iops": one.iops} for one in found]
        click.echo(json.dumps({"measured": rows, "direct": target.is_direct}, indent=1))
        return 0
    for line in _lines(name, target, sweep, found):
        click.echo(printable(line))
    return 0


def _plotted_here(name: str, found: Sequence[Measured]) -> str:
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


def _picture(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Return the file to draw in, so that nothing is measured in vain."""
    if path and path.suffix != ".svg":
        raise click.BadParameter(f"{path} does not end in .svg, which is what is drawn")
    if path and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"{path} cannot be written")
    return path


@click.command(epilog=epilog(codes=(2, 3, 4, 5, 6, 8)))
@click.option(
    "--source",
    metavar="SRC",
    default="",
    shell_complete=files,
    help="Measure how fast this file on shared storage is read. A URL or a folder is measured "
    "as with --here.",
)
@click.option(
    "--root",
    metavar="FOLDER",
    default="",
    shell_complete=roots,
    help="Measure the disk of this staging folder (one of `roots` in stage.toml).  "
    "[default: the first one]",
)
@click.option(
    "--size",
    type=click.IntRange(1, 1 << 24),
    default=256,
    metavar="MIB",
    show_default=True,
    help="Size in MiB of the test file and of the largest block that is sent. With --here, the "
    "most that is read or written for each row.",
)
@click.option(
    "--here",
    is_flag=True,
    help="Measure this machine alone, by block size and number of threads: the source, or "
    "without --source the disk.",
)
@click.option(
    "--blocks",
    metavar="LIST",
    default="",
    callback=sizes,
    help="With --here, the sizes of blocks, such as 4K,1M; of a URL, how much a request asks for.",
)
@click.option(
    "--threads",
    metavar="LIST",
    default="",
    callback=numbers,
    help="With --here, the numbers of threads, or of requests at once.  [default: 1,4,16]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 3600),
    default=2,
    metavar="S",
    show_default=True,
    help="With --here, the most seconds for each row.",
)
@click.option("--random", is_flag=True, help="With --here, take blocks in random order.")
@click.option(
    "--plot",
    metavar="FILE.svg",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_picture,
    help="Also draw the rates by size of the message or block in this file, which is replaced.",
)
@run_options
@json_option
def bench(
    source: str,
    root: str,
    size: int,
    here: bool,
    blocks: tuple[int, ...],
    threads: tuple[int, ...],
    seconds: float,
    random: bool,
    plot: Path | None,
    run: RunOptions,
    as_json: bool,
) -> int:
    """Measure the network, the disks and the source of this job's nodes.

    Each is measured by itself, with the code that a stage uses. Staging cannot be faster than the
    slowest of them, except if several nodes read a slow source. A node is marked as slow if it does
    less than a third of what the others do. Nothing is staged, and the files that are written
    are removed. Run it inside a job, with --hosts, or with --local.

    With --here, and for a URL or a folder, this machine alone reads blocks of several sizes with
    several threads (on its own disk, it writes them before), without the page cache, which helps to
    choose values for stage.toml. That needs no job.
    """
    if here or is_url(source) or os.path.isdir(source):
        sweep = Sweep(blocks, threads, random, seconds, size << 20)
        return _bench_here(source, root, sweep, run, plot, as_json=as_json)
    rates: list[Rate] = []
    of_nodes: list[NodeRates] = []

    def on_event(event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "rate":
            rates.append(Rate(**event))
        elif kind == "node_rates":
            of_nodes.append(NodeRates(**event))

    nodes = _find_nodes(run)
    request = build_request((_item(source, root, nodes.rules),), nodes.rules)
    outcome = nodes.run(replace(request, bench=size << 20), on_event)
    if plot and not outcome.failures:
        plot.write_text(_plotted(rates))
    if as_json:
        measured = {**outcome.to_json(), "rates": [asdict(rate) for rate in rates]}
        measured["nodes"] = [asdict(one) for one in of_nodes]
        click.echo(json.dumps(measured, indent=1))
    elif outcome.failures:
        print_outcome(outcome, say, complain)
    else:
        for line in (*rate_lines(rates, width()), *node_lines(of_nodes, width())):
            click.echo(printable(line))
    return outcome.code


def _find_nodes(run: RunOptions) -> JobNodes | SimulatedNodes | HostNodes:
    """Return the nodes. Raise UsageError if this process is not the first of several that do so."""
    nodes = find_nodes(run)
    line = same_line(nodes, ())
    if line and line.later:
        raise UsageError(
            f"{line.later}, but one process measures all nodes: run stagectl bench on the first "
            "alone"
        )
    return nodes


def _plotted(rates: Sequence[Rate]) -> str:
    """Return the picture of what the ranks measured."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for rate in rates:
        if rate.what == "wire":
            lines.setdefault(rate.algorithm, []).append((rate.size, rate.speed))
    limits = dict(named_rate(rate) for rate in rates if rate.what != "wire")
    return svg("broadcast to all nodes of the job", "size of the message", lines, limits)


def _bench_here(
    source: str, root: str, sweep: Sweep, run: RunOptions, plot: Path | None, *, as_json: bool
) -> int:
    """Measure the source, or the disk of a staging folder, from this machine."""
    if run.local:
        raise UsageError("--here measures this machine itself: remove --local")
    if source:
        rules = load_policy(run.config, simulated=True)
        return measure_source(
            source if is_url(source) else absolute(source), rules, sweep, plot, as_json=as_json
        )
    rules = load_policy(run.config, simulated=False)
    return measure_disk(_root(root, rules), rules, sweep, plot, as_json=as_json)


def _item(source: str, root: str, rules: Policy) -> StageItem:
    """Return what to measure: the source and a staging folder. Raise PolicyRefusal."""
    root = _root(root, rules)
    return StageItem(absolute(source) if source else "", f"{root}/bench", root, Options())


def _root(root: str, rules: Policy) -> str:
    """Return the staging folder to measure. Raise PolicyRefusal."""
    roots = {known or "/": known for known in rules.roots}
    if not roots:
        absent = " or ".join(rules.absent_roots)
        raise PolicyRefusal(f"{absent}: there in a job only; measure in a job")
    if root and root not in roots:
        known = " or ".join(roots)
        raise PolicyRefusal(
            f"{root} is not a staging folder (one of `roots` in stage.toml); use --root {known}"
        )
    return roots[root] if root else rules.roots[0]
