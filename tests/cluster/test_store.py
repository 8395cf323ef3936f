"""The next job, whose folder is another one: what it stages is in the nodes' store.

Sites give their jobs a disk in the ways of `shapes`.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from stager.base.options import Via
from tests.cluster import shapes
from tests.cluster.watch import Watch
from tests.support.nightly import repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from tests.cluster.cluster import Job
    from tests.cluster.shapes import Shape
    from tests.cluster.site import Site

    Make = Callable[[Site], AbstractContextManager[Shape]]

FOLDER = "/shared/stored"
#: The files of a folder, each for something else that a job does to it.
NAMES = ("write", "truncate", "append", "chmod", "rename", "remove", "leave")


@pytest.fixture(scope="module", autouse=True)
def _sources(tidied_site: Site) -> None:
    lines = [
        f"mkdir -p {FOLDER}/dir; cd {FOLDER}; head -c 3000000 /dev/urandom > f",
        f"for name in {' '.join(NAMES)}; do echo the $name of the source > dir/$name; done",
        "/usr/bin/python3 -m venv --without-pip env",
        f"printf '#!{FOLDER}/env/bin/python\\nimport sys; print(sys.prefix)\\n' > env/bin/tool",
        "chmod +x env/bin/tool",
        f"for via in {' '.join(Via)}; do cp f f.$via; cp -r dir dir.$via; done",
    ]
    tidied_site.run("\n".join(lines))


@contextmanager
def stored(site: Site, make: Make) -> Iterator[Shape]:
    """Have a site that gives jobs a folder each, with a store beside them on the same disk."""
    with make(site) as shape:
        site.write_policy(f'{shape.policy()}[cache]\nstore = "{shape.disk}/store"\n')
        yield shape


def done(site: Site, script: str, *options: str) -> Job:
    job = site.sbatch(script, *options)
    assert job.wait().exit_code == "0:0", job.output()
    return job


@contextmanager
def unread(site: Site) -> Iterator[None]:
    """Fail if any process reads a file of the sources within the block.

    But for pyvenv.cfg, which tells what a folder is.
    """
    folders = [path for path in site.shared("stored").rglob("*") if path.is_dir()]
    with ExitStack() as stack:
        watches = {path: stack.enter_context(Watch(path)) for path in folders}
        watches[folders[0].parent] = stack.enter_context(Watch(folders[0].parent))
        yield
    read = {path.name: watch.read for path, watch in watches.items()}
    assert read == dict.fromkeys(read, 0) | {"env": 1}


@pytest.mark.parametrize(
    "make",
    [
        shapes.alliance,
        shapes.job_container,
        repeated(shapes.gres),
        repeated(shapes.auto_tmpdir),
        repeated(partial(shapes.auto_tmpdir, first=True)),
    ],
    ids=["alliance", "job_container", "gres", "auto_tmpdir", "auto_tmpdir_first"],
)
def test_the_next_job_reads_and_moves_nothing(site: Site, make: Make) -> None:
    with stored(site, make) as shape:
        here = f"${shape.variable}"
        wish = f"{FOLDER}/f:{here}/f;{FOLDER}/env:{here}/env,as=env"
        script = f"""#!/bin/bash
#SBATCH --nodes=2 --nodelist=n[1-2] {" ".join(shape.request)}
#SBATCH --stage={wish}
srun bash -c 'sha256sum <{here}/f; $STAGE_env/bin/tool; head -n1 $STAGE_env/bin/tool'
"""
        first = done(site, script)
        with unread(site):
            second = done(site, script)
        digest = hashlib.sha256(site.shared("stored/f").read_bytes()).hexdigest()
        for job in (first, second):
            env = f"{shape.folder(job, 'alice')}/env"
            found = [line for line in job.output().splitlines() if not line.startswith("stage:")]
            expected = [f"{digest}  -", env, f"#!{env}/bin/python"] * 2
            assert sorted(found) == sorted(expected), job.output()
        told = [line for line in second.output().splitlines() if line.startswith("stage:")]
        at = shape.folder(second, "alice")
        for line, name in zip(told, ("f", "env"), strict=True):
            begin = f"stage: {at}/{name}: current on n[1-2] (2 nodes), nothing moved "
            assert line.startswith(begin), line


def test_the_tasks_of_an_array_read_the_source_once_a_node(site: Site) -> None:
    """Four at a time on each node, each with a folder of its own."""
    text = f"""#!/bin/bash
#SBATCH --array=1-12%8 --cpus-per-task=4 --exclude=n[3-4] --nodes=1
#SBATCH --stage={FOLDER}/f:$SLURM_TMPDIR/f
sha256sum <$SLURM_TMPDIR/f
"""
    source = site.shared("stored/f")
    with stored(site, shapes.alliance), Watch(source) as watch:
        job = done(site, text)
        output = job.output()
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert output.count(f"{digest}  -\n") == 12
    assert 1 <= watch.opened <= 2


#: What a job does to what it staged, as programs do.
CHANGES = """
chmod -R u+w dir/. f
echo changed >dir/write
truncate --size=1 dir/truncate
echo more >>dir/append
chmod 0 dir/chmod
mv dir/rename dir/renamed
rm dir/remove
printf x | dd of=f conv=notrunc bs=1 seek=1000 status=none
"""
WAYS = {Via.AUTO: "(reflink|hard link)", Via.COPY: "copy", Via.LINK: "symbolic link"}


def test_what_a_job_does_to_its_copies_no_other_job_finds(site: Site) -> None:
    source = site.shared("stored")
    files = [source / "f", *(source / "dir" / name for name in sorted(NAMES))]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    with stored(site, shapes.alliance) as shape:
        here = f"${shape.variable}"
        lines = [
            f"#SBATCH --stage={FOLDER}/{name}.{via}:{here}/{via}/{name},via={via}"
            for via in Via
            for name in ("f", "dir")
        ]
        begin = "\n".join(["#!/bin/bash", "#SBATCH --nodelist=n1", *lines, "set -e"])
        for_each = f"for via in {' '.join(Via)}; do cd {here}/$via;"
        done(site, f"{begin}\n{for_each}{CHANGES}done\n")
        job = done(site, f"{begin}\n{for_each} sha256sum f dir/* | cut -c-64; done\n")
        output = job.output()
        assert re.findall("^[0-9a-f]{64}$", output, re.MULTILINE) == digests * len(Via), output
        told = done(site, f"{begin}\n").output()
        for via, way in WAYS.items():
            assert re.search(rf"/{via}/dir: current .*, {way} of the node's copy", told), told
