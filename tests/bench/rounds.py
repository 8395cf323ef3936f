"""Inside a job: run each tool in turn, round after round, and print one JSON line for each run.

Reads ``{"rounds": N, "tools": {name: {"before": shell, "run": shell}}}`` from the file named by its
argument. A tool's ``before`` is not timed; ``run`` is, from its start to its exit. If a tool prints
a line ``alone SECONDS``, that is the time of its transfer alone. Uses only the standard library,
because it runs on a node of the test cluster.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    for number in range(plan["rounds"] + 1):  # round 0 warms up
        for name, tool in plan["tools"].items():
            subprocess.run(["bash", "-c", tool["before"]], check=True, capture_output=True)
            begun = time.monotonic()
            done = subprocess.run(
                ["bash", "-c", tool["run"]], capture_output=True, text=True, check=False
            )
            seconds = time.monotonic() - begun
            alone = re.search(r"^alone ([0-9.]+)$", done.stdout, re.MULTILINE)
            result = {
                "round": number,
                "tool": name,
                "seconds": seconds,
                "alone": float(alone[1]) if alone else None,
                "code": done.returncode,
                "output": (done.stdout + done.stderr)[-400:] if done.returncode else "",
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
