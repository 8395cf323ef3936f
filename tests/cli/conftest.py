"""Fixtures of a user's desk: a new one, one in a job, one with staged copies."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.desk import Desk

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.stagectl import Ran


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Desk, Ran]:
    """A desk with one file staged to three nodes, and what was printed as JSON."""
    folder = tmp_path_factory.mktemp("staged")
    for above in (folder, folder.parent, folder.parent.parent):
        above.chmod(0o755)  # a copy of what lies in a closed folder would be closed, too
    desk = Desk(folder)
    return desk, desk.local("stage", "--json", f"{desk.source}:/nvme/img.sqsh")


#: An srun for jobs of one node, which is this one: a world of one rank needs no launcher.
SRUN = f"""#!/bin/sh
while [ "$1" != {sys.executable} ]; do shift; done
exec "$@"
"""
#: Such a rank has nobody to share memory with, and would leave its segment behind.
ALONE = '[launch.environment]\nOMPI_MCA_btl = "self"\n'


@pytest.fixture
def job(tmp_path: Path) -> Desk:
    """A desk in a job of one node, whose disk is a folder."""
    desk = Desk(tmp_path, alone=True)
    (desk.folder / "srun").write_text(SRUN)
    (desk.folder / "srun").chmod(0o755)
    (desk.folder / "nvme").mkdir()
    desk.config.write_text(
        f'roots = ["{desk.folder}/nvme"]\n[launch]\nsrun = "{desk.folder}/srun"\n'
        f'mpi = "pmix"\n{ALONE}'
    )
    return desk


#: Plays srun and the plugin's helper on two nodes, whose disks are this one's; n3 is down.
NODES_SRUN = """\
#!/bin/bash
while [ "${1#-}" != "$1" ] || [ "${1%python*}" = "$1" ]; do shift; done
for number in 1 2; do
	echo "srun: launching StepId=17.0 on host n$number, 1 tasks: $number" >&2
	SLURMD_NODENAME=n$number "$@" 2>&1 | sed "s/^/$number: /"
done
"""


@pytest.fixture
def cluster(desk: Desk) -> Desk:
    """A desk in a job of three nodes, one of which is down."""
    programs = {"srun": NODES_SRUN, "sinfo": "#!/bin/sh\necho 'n1|drained'\necho 'n3|down*'\n"}
    for name, text in programs.items():
        (desk.folder / name).write_text(text)
        (desk.folder / name).chmod(0o755)
    (desk.folder / "nvme").mkdir()
    desk.config.write_text(
        f'roots = ["{desk.folder}/nvme"]\n[launch]\nsrun = "{desk.folder}/srun"\nmpi = "pmix"\n'
    )
    return desk


@pytest.fixture
def copies(desk: Desk) -> Desk:
    """A desk with one file staged to three nodes, for one test alone."""
    assert desk.local("stage", f"{desk.source}:/nvme/img.sqsh").code == 0
    return desk
