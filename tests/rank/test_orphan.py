"""A rank ends with the process that started it."""

from __future__ import annotations

import subprocess
import sys

#: Starts a process that ends with its parent, and shows when that has begun.
PARENT = f"""
import subprocess
child = '''
import time
from stager.rank.orphan import end_with_parent
end_with_parent()
print("begun", flush=True)
time.sleep(60)
'''
subprocess.run(["{sys.executable}", "-c", child])
"""


def test_a_process_ends_soon_after_its_parent_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == b"begun\n"
        parent.kill()
        # Its end closes the pipe.
        rest, _ = parent.communicate(timeout=10)
    assert rest == b""
