"""Check an item's options against what its source is: a file or a folder. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.base.errors import PolicyRefusal, UsageError
from stager.base.options import ITSELF, Links, Mode
from stager.source.location import is_url

if TYPE_CHECKING:
    from stager.request.items import StageItem


def check_options(item: StageItem, *, is_folder: bool) -> None:
    """Raise UsageError or PolicyRefusal if the item's options do not fit its source."""
    options = item.options
    becomes_tree = is_folder or options.extract
    if not is_folder and (options.include or options.exclude):
        raise UsageError(
            f"{item.source} is not a folder; remove include and exclude, which are for folders"
        )
    if options.links is Links.FOLLOW and (is_url(item.source) or not is_folder):
        raise UsageError(f"{item.source} is not a folder on a filesystem; remove links=follow")
    if options.mode is Mode.SHARD and not is_folder:
        raise UsageError(f"{item.source} is not a folder; mode=shard is for folders")
    if is_folder and options.extract:
        raise UsageError(f"{item.source} is a folder; extract is for archives")
    if is_folder and options.decompress == ITSELF:
        raise UsageError(
            f"{item.source} is a folder; name the files in it that are to be decompressed by a "
            "pattern, such as decompress=*"
        )
    if not is_folder and options.decompress not in ((), ITSELF):
        raise UsageError(
            f"{item.source} is not a folder; write decompress alone, without a pattern"
        )
    if becomes_tree and item.shared:
        raise PolicyRefusal(
            f"{item.destination} would be a folder, but beneath {item.root} only single files are "
            "staged, for all users; choose a destination elsewhere"
        )
