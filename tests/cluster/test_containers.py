"""Containers whose images are staged.

Charliecloud is a real one, which the job's own commands start. Plugins that enter a container in
task_init, as pyxis does, must be listed below this plugin: `enter_container.c` stands in for pyxis,
by whose name it is found, and by another name for a plugin that nobody knows.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import CommandFailed, shown
from tests.cluster.hostile import fuse
from tests.cluster.site import HANGS, PLUGSTACK, PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.cluster import Job
    from tests.cluster.site import Site

PYXIS, UNKNOWN = "/shared/spank_pyxis.so", "/shared/other.so"
STAGE = "--stage=/shared/root.img:/nvme/root.img"
CONTAINER = "--image=/nvme/root.img"
#: Fails outside of the container, and before the image is there.
INSIDE = f"test ! -e {PREFIX} && cmp /shared/root.img /nvme/root.img && echo $SLURMD_NODENAME"
STAGED = r"stage: /nvme/root\.img: (4 B from|current on) .*"
REFUSED = (
    f"in plugstack.conf, {PYXIS} is above {PREFIX}/lib/spank_stage.so, so nothing can be staged; "
    "tell the administrator to move the line of spank_stage.so above that of pyxis (line 2 of "
    "/etc/slurm/plugstack.conf, below line 3 of /etc/slurm/plugstack.d/10-pyxis.conf)\n"
)
REFUSED_INSIDE = (
    f"a plugin that is above {PREFIX}/lib/spank_stage.so in plugstack.conf has entered a container,"
    " so nothing can be staged; tell the administrator to move the line of spank_stage.so above "
    "that of the other\n"
)


@pytest.fixture(autouse=True)
def _plugins(site: Site) -> None:
    site.shared("root.img").write_text("img\n")
    source = Path(__file__).with_name("enter_container.c")
    flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    for path in (PYXIS, UNKNOWN):
        built = site.shared(Path(path).name)
        if not built.exists():
            subprocess.run(["gcc", *flags, "-o", built, source], check=True)


@contextmanager
def plugstack(site: Site, text: str) -> Iterator[None]:
    """Use another plugstack.conf within a with block."""
    site.write_plugstack(text)
    try:
        yield
    finally:
        site.write_plugstack(PLUGSTACK)


@contextmanager
def last(site: Site, plugin: str) -> Iterator[None]:
    """List the other plugin below this one within a with block."""
    with plugstack(site, f"{PLUGSTACK}required {plugin}\n"):
        yield


@contextmanager
def first(site: Site, plugin: str) -> Iterator[None]:
    """List the other plugin above this one, in an included file, within a with block."""
    folder = site.path("login", "/etc/slurm/plugstack.d")
    folder.mkdir()
    (folder / "10-pyxis.conf").write_text(f"# containers\n\n  required\t{plugin}\n")
    try:
        with plugstack(site, f"include /etc/slurm/plugstack.d/*.conf\n{PLUGSTACK}"):
            yield
    finally:
        shutil.rmtree(folder)


def batch(site: Site, script: str, *options: str, code: str = "0:0") -> str:
    """Run a job on two nodes and return its output."""
    return output(site.sbatch(script, "-N2", "-wn[1-2]", *options), code)


def output(job: Job, code: str = "0:0") -> str:
    """Return what the job wrote."""
    assert job.wait().exit_code == code, job.output()
    return job.output()


def test_listed_before_files_are_there_when_the_container_starts(site: Site) -> None:
    srun = f"srun --mpi=pmix {CONTAINER} /bin/bash -c '{INSIDE}'"
    with last(site, PYXIS):
        outputs = [
            batch(site, f"#!/bin/bash\n#STAGE /shared/root.img:/nvme/root.img\n{srun}"),
            batch(site, srun.replace("--mpi=pmix", "--export=ALL"), STAGE, "--export=NONE"),
            shown(site.run(srun.replace("srun", f"srun -N2 -wn[1-2] {STAGE}"))),
            shown(site.run(f"salloc -N2 -wn[1-2] {STAGE} {srun}")),
        ]
        outputs.append(batch(site, INSIDE, STAGE, CONTAINER) + "n2\n")  # the batch step is on n1
    for output in outputs:
        summary, *nodes = sorted(output.splitlines(), reverse=True)
        assert re.fullmatch(STAGED, summary), output
        assert nodes == ["n2", "n1"]


def test_listed_before_a_plugin_that_makes_mounts_in_task_init_privileged_jobs_stage(
    site: Site,
) -> None:
    script = "touch /tmp/private && cmp /shared/root.img /nvme/root.img && echo same"
    with plugstack(site, f"{PLUGSTACK}required {UNKNOWN} private_tmp\n"):
        summary, said = batch(site, script, STAGE).splitlines()
    assert re.fullmatch(STAGED, summary)
    assert said == "same"
    assert not site.path("n1", "/tmp/private").exists()  # the plugin was there


@pytest.mark.parametrize(
    "line",
    [["sbatch", "--wrap", "true"], ["salloc", "true"], ["srun", CONTAINER, "true"]],
    ids=lambda line: line[0],
)
def test_listed_after_pyxis_a_job_that_stages_is_refused(site: Site, line: list[str]) -> None:
    with first(site, PYXIS), pytest.raises(CommandFailed) as refused:
        site.run([line[0], STAGE, *line[1:]])
    assert (refused.value.code, refused.value.stdout) == (3, "")
    assert refused.value.stderr == f"stage: {REFUSED}"
    assert site.run(["squeue", "-h"]).stdout == ""


def test_listed_after_pyxis_what_is_found_out_on_the_node_fails_at_once(site: Site) -> None:
    with last(site, PYXIS):
        held = site.sbatch("echo started", "-N1", "-wn2", "--hold", STAGE, CONTAINER)
    lines = "#!/bin/bash\n#STAGE /shared/root.img:/nvme/root.img\necho started\n"
    with site_log(site, "n3") as log, first(site, PYXIS):
        begun = time.monotonic()
        site.run(["scontrol", "release", held.id])
        assert output(held, "3:0") == f"stage: n2: {REFUSED}"
        assert batch(site, lines, CONTAINER, code="3:0") == f"stage: n1: {REFUSED}"
        assert time.monotonic() - begun < HANGS
        # A job that stages nothing runs.
        assert batch(site, "echo started") == "started\n"
        site.restart_slurmd("n3")
    assert f"error: stage: {REFUSED}" in log[0]


@contextmanager
def site_log(site: Site, node: str) -> Iterator[list[str]]:
    """Yield a list that has what slurmd wrote to its log within the with block, at its end."""
    path, added = site.base / f"log/slurmd-{node}.log", [""]
    before = path.stat().st_size
    yield added
    added[0] = path.read_text()[before:]


def test_listed_after_a_plugin_that_enters_a_container_every_task_is_refused(site: Site) -> None:
    for node in site.nodes:  # or that plugin fails first
        site.copy(node, "/nvme/root.img").write_text("img\n")
    begun = time.monotonic()
    with first(site, UNKNOWN):
        done = site.run(["srun", "-N4", STAGE, CONTAINER, "true"], check=False)
        assert batch(site, INSIDE, CONTAINER) == "n1\n"  # a job that stages nothing runs
    assert done.returncode == 3
    said = sorted(line for line in done.stderr.splitlines() if line.startswith("stage: "))
    assert said == [f"stage: {node}: {REFUSED_INSIDE}".rstrip() for node in site.nodes]
    assert time.monotonic() - begun < HANGS


def test_charliecloud_starts_a_staged_image_and_a_staged_folder(site: Site) -> None:
    root = site.shared("box")
    for name in ("dev", "etc", "home", "proc", "sys", "tmp"):
        (root / name).mkdir(parents=True)
    for name in ("group", "hosts", "passwd", "resolv.conf"):
        (root / "etc" / name).touch()
    program = '#include <stdio.h>\nint main(void) { return puts("in the box") < 0; }\n'
    gcc = ["gcc", "-static", "-xc", "-", "-o", str(root / "hello")]
    subprocess.run(gcc, input=program, text=True, check=True)
    pack = ["mksquashfs", str(root), str(site.shared("box.sqsh")), "-quiet", "-no-progress"]
    subprocess.run(pack, check=True, capture_output=True)
    script = "srun ch-run /nvme/box.sqsh -- /hello && srun ch-run /nvme/box -- /hello"
    with ExitStack() as stack:
        for node in ("n1", "n2"):
            stack.enter_context(fuse(site, node))
        output = batch(
            site, script, "--stage=/shared/box.sqsh:/nvme/", "--stage=/shared/box:/nvme/"
        )
    assert output.splitlines()[2:] == ["in the box"] * 4
