"""Run the servers of OpenStack Swift with one disk, until SIGTERM ends them; they log to stderr.

``/usr/bin/python3 -I swift_servers.py FOLDER account=PORT container=PORT object=PORT``, by the
Python that Debian's python3-swift is installed for. In the folder are swift.conf, a NAME.conf for
each of these servers and for the proxy, and the folder "disk". The rings are made there.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import eventlet
from swift.common.ring import RingBuilder
from swift.common.utils import set_swift_dir
from swift.common.wsgi import run_wsgi


def make_ring(folder: Path, name: str, port: int) -> None:
    """Write the ring of one server: of one part, and one replica."""
    ring = RingBuilder(part_power=0, replicas=1, min_part_hours=0)
    place = {"region": 1, "zone": 1, "ip": "127.0.0.1", "port": port}
    ring.add_dev({**place, "device": "disk", "weight": 1})
    ring.rebalance()
    ring.get_ring().save(str(folder / f"{name}.ring.gz"))


def start(folder: Path, name: str) -> int:
    """Start one server. Return its process ID."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            run_wsgi(str(folder / f"{name}.conf"), f"{name}-server", verbose=True)
        finally:
            os._exit(1)
    return child


def main(folder: Path, ports: dict[str, int]) -> None:
    """Start all, and end all when one ends."""
    set_swift_dir(str(folder))
    for name, port in ports.items():
        make_ring(folder, name, port)
    # Each server would do this, and it takes most of the time of its start.
    eventlet.monkey_patch(all=False, socket=True, select=True, thread=True)
    children: list[int] = []

    def end(*_: object) -> None:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            while True:
                os.wait()
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    for name in (*ports, "proxy"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        children.append(start(folder, name))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.wait()  # none is of use without the others
    end()


if __name__ == "__main__":
    given = (argument.split("=") for argument in sys.argv[2:])
    main(Path(sys.argv[1]), {name: int(port) for name, port in given})
