"""A rank ends with the process that started it."""

from __future__ import annotations

import subprocess
import sys

#: A rank that imports mpi4py as from shared storage that hangs, and shows when that has begun.
RANK = """
import os, sys, time
class Storage:
    def find_spec(self, name, path, target=None):
        if name == "mpi4py":
            os.write(1, b"imports\\n")
            time.sleep(60)
sys.meta_path.insert(0, Storage())
from stager.rank.__main__ import main
main()
"""
#: Replaces itself by a rank whose parent has ended before.
LATE = f"""
import os, sys, time
while os.getppid() == int(os.environ["STAGE_PARENT"]):
    time.sleep(0.01)
os.execv(sys.executable, [sys.executable, "-c", {RANK!r}])
"""
#: Starts that, in a network of its own where root would be refused, and ends.
PARENT_OF_LATE = f"""
import os, subprocess
from stager.base.linux import leave_network
if os.getuid() == 0:
    leave_network()
os.environ["STAGE_PARENT"] = str(os.getpid())
subprocess.Popen([{sys.executable!r}, "-c", {LATE!r}])
"""
#: Starts the rank, in a network of its own where root would be refused.
PARENT = f"""
import os, subprocess
from stager.base.linux import leave_network
if os.getuid() == 0:
    leave_network()
subprocess.run([{sys.executable!r}, "-c", {RANK!r}])
"""


def test_a_rank_ends_soon_after_its_parent_was_killed_even_while_it_imports_mpi() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == b"imports\n"
        parent.kill()
        # The rank's end closes the pipe.
        rest, _ = parent.communicate(timeout=10)
    assert rest == b""


def test_a_rank_whose_parent_ended_before_the_rank_began_ends_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT_OF_LATE], stdout=subprocess.PIPE, timeout=60, check=True
    )
    assert done.stdout in (b"", b"imports\n")  # the rank's end closes the pipe
