"""``fan_out.py SOURCE DESTINATION HOST…``: put a folder on each host by rsync over ssh.

The fan-out that `ezpz yeet` documents: the first host, this one, copies the folder to its own disk;
then each host that has it sends it to others, up to eight at a time, and who has the fewest to send
to is next. Uses only the standard library, because it runs on a node of the test cluster.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

#: How many hosts one host sends to at the same time.
MOST = 8
#: rsync's options for the first copy, and for those to other hosts.
FIRST, OTHERS = ["-rlD", "--whole-file"], ["-rlD"]


def main() -> None:
    source, destination, own, *others = sys.argv[1:]
    subprocess.run(["rsync", *FIRST, f"{source}/", f"{destination}/"], check=True)
    busy = {own: 0}
    running: dict[Future[None], tuple[str, str]] = {}
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        while others or running:
            while others and min(busy.values()) < MOST:
                sender, target = min(busy, key=busy.__getitem__), others.pop(0)
                busy[sender] += 1
                sent = pool.submit(send, "" if sender == own else sender, target, destination)
                running[sent] = sender, target
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                sender, target = running.pop(done)
                done.result()
                busy[sender] -= 1
                busy[target] = 0


def send(sender: str, target: str, folder: str) -> None:
    """Send the folder of ``sender``, or of this host without one, to ``target``."""
    line = ["rsync", *OTHERS, f"{folder}/", f"{target}:{folder}/"]
    if sender:
        line = ["ssh", sender, shlex.join(line)]
    subprocess.run(line, check=True)


if __name__ == "__main__":
    main()
