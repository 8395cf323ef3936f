"""Write the reference, or with ``--check`` only say which of its files differ from the code.

cd packaging && python -m reference [--check]
"""

from __future__ import annotations

import sys

from reference.pages import write


def main() -> None:
    """Do what the command line says."""
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit("usage: python -m reference [--check]")
    sys.exit(write(check=len(sys.argv) > 1))


main()
