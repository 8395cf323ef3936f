"""TODO."""

from __future__ import annotations

#: The archives that can be unpacked, by the ends of their names.
ARCHIVES = (
    ".tar.gz", ".tgz", ".tar.zst", ".tzst", ".tar.xz", ".txz", ".tar", ".zip",
)  # fmt: skip


def archive_suffix(path: str) -> str:
    """The end of an archive's name by which it is known, or nothing."""
    return next((end for end in ARCHIVES if path.lower().endswith(end)), "")
