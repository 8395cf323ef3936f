"""``stagectl pack``: pack a folder into one archive."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from stager.archive.create import SUFFIX
from stager.archive.create import pack as pack_folder
from stager.base.errors import DestinationError
from stager.base.text import bytes_text, files_text, seconds_text
from stager.cli.command import Command
from stager.cli.progress import Progress
from stager.cli.shared_options import json_option
from stager.cli.terminal import ignore, print_json, say
from stager.fs.files import as_stage_error
from stager.request.lexer import escape
from stager.request.names import absolute

if TYPE_CHECKING:
    from collections.abc import Callable

    from stager.archive.create import Packed


#: Seconds between two looks at how far it is.
_PERIOD = 0.2


@click.command(cls=Command)
@click.argument("folder", type=click.Path())
@click.argument("archive", type=click.Path(), required=False)
@json_option
def pack(folder: str, archive: str | None, as_json: bool) -> None:
    """Pack a folder of many files into one archive.

    The command prints the --stage option for it, but not of a conda environment.

    ARCHIVE is FOLDER.tar.zst by default. A name that ends in .sqsh makes a squashfs image, which
    is staged as it is. Nothing is packed if ARCHIVE is up to date, and no other file is replaced.
    ARCHIVE is readable by its owner alone.
    """
    beside = f"{absolute(folder)}{SUFFIX}"
    path = archive or beside
    start = time.monotonic()
    try:
        with Progress(ignore if as_json else say, bars=None if as_json else sys.stdout) as progress:
            packed = pack_folder(folder, path, _shown(progress, path))
    except FileNotFoundError:
        text = f"{path}: its folder does not exist; make it, or choose another place"
        raise DestinationError(text) from None
    except OSError as error:
        raise as_stage_error(error, path) from None
    seconds = time.monotonic() - start
    if as_json:
        print_json(_to_json(packed, seconds))
    else:
        _report(path, packed, seconds)


def _shown(progress: Progress, path: str) -> Callable[[int, int], None]:
    """Return a function that shows how many bytes are read for the archive at ``path``."""
    begun = time.monotonic()
    shown = begun

    def tell(done: int, size: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= _PERIOD:
            shown = now
            event = {"event": "progress", "destination": path, "sent": done, "size": size}
            progress.show({**event, "seconds": now - begun})

    return tell


def _to_json(packed: Packed, seconds: float) -> dict[str, Any]:
    """Return a JSON object; the options are those with which a job stages the archive."""
    options = [option for option in packed.options.split(",") if option]
    own = {"archive": absolute(packed.archive), "options": options, "seconds": seconds}
    return {**asdict(packed), **own}


def _report(path: str, packed: Packed, seconds: float) -> None:
    files = f"{files_text(packed.files)}, {bytes_text(packed.size)}"
    size = bytes_text(packed.packed_size)
    if packed.fresh:
        say(f"{path}: {files} packed into {size} in {seconds_text(seconds)}")
    else:
        say(f"{path}: up to date, nothing packed ({files} in {size})")
    if packed.conda:
        say(
            "a conda environment works only at the path where it was made; to stage it to DST, "
            "pack it with conda-pack --dest-prefix DST"
        )
    else:
        option = f"--stage={escape(absolute(path))}:DST{packed.options}"
        say(f"stage it with {quote(option)}")
