"""Write all manual pages beneath a folder, as man(1) looks for them: ``man1/stagectl.1``.

    cd packaging && python -m man FOLDER

The date in the pages is that of SOURCE_DATE_EPOCH, or today.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from man.pages import PAGES, make_page


def main() -> None:
    """Write the pages into the folder that the command line names."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m man FOLDER")
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    date = datetime.fromtimestamp(seconds, UTC).date().isoformat()
    for name in PAGES:
        path = Path(sys.argv[1], f"man{name[-1]}", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make_page(name, date), "utf-8")


main()
