"""Run a program in a network of its own, which nothing outside can reach.

``python -I -m stager.launch.alone PROGRAM ARGUMENT…``, as root. mpiexec listens on TCP ports of all
interfaces, even for processes of one machine.
"""

from __future__ import annotations

import os
import sys

from stager.base import linux


def main() -> None:
    """Leave the machine's network and become the program. End with 3 if that is not possible."""
    try:
        linux.leave_network()
    except OSError as error:
        sys.stderr.write(
            f"simulated nodes of root need a network of their own, which cannot be made here: "
            f"{error.strerror}; run this as an ordinary user\n"
        )
        sys.exit(3)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.exit(f"{sys.argv[1]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()
