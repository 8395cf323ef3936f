"""Write the reference, or with ``--check`` only say which of its files differ from the code.

cd packaging && python -m reference [--check]
"""

from __future__ import annotations

import sys

from reference.pages import FOLDER, PAGES, TEMPLATE, template


def main() -> None:
    """Write all files, or compare them. A difference ends with code 1."""
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit("usage: python -m reference [--check]")
    texts = {FOLDER / name: make() for name, make in PAGES.items()} | {TEMPLATE: template()}
    different = [
        path for path, text in texts.items() if not path.exists() or path.read_text() != text
    ]
    if len(sys.argv) > 1:
        for path in different:
            sys.stderr.write(f"{path} is not what the code says: run make reference\n")
        sys.exit(bool(different))
    for path in different:
        path.write_text(texts[path])


main()
