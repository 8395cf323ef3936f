"""What pages show of jobs is what jobs print today."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.cluster import shapes
from tests.cluster.site import PREFIX
from tests.documents.pages import DOCS, NOT_RUN, blocks, said
from tests.support.nightly import repeated
from tests.support.session import without_figures

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

#: Where pages have a directive of a script and, below it, what the job prints of it.
SHOWN = (
    "README.md",
    *(f"{DOCS}/guide/{one}.md" for one in ("folders", "python", "archives", "dataset-parts")),
)
RUN = "guide/archives", repeated("guide/python"), "guide/interactive", "guide/space", "admin/check"
BEFORE = """\
mkdir -p /shared/data /shared/set
for name in weights.pt data/a data/b set/part-00{0,1,2,3}.tar; do
    head -c 300000 /dev/urandom >/shared/$name
done
python3 -m venv --without-pip /shared/env
seq 100000 | zstd -q >/shared/set.jsonl.zst
"""


def alike(line: str) -> str:
    """Return a line without what differs from run to run, and with the size of the sources."""
    for pattern, name in ((r"\d[\d.]* (?:[KMG]i)?B\b(?!/s)", "SIZE"), (r"\b\d+ files?\b", "FILES")):
        line = re.sub(pattern, name, line)
    return without_figures(line)


def examples(page: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the directives of a script, and what is printed of them, block by block."""
    asked: list[str] = []
    for block in blocks(page):
        lines = block.text.splitlines()
        asked += [line for line in lines if line.startswith("#SBATCH --stage=")]
        if printed := [line for line in lines if line.startswith("stage: ")]:
            yield asked, printed
        if printed or "docs" in page:
            asked = []


def test_jobs_print_what_is_shown_below_their_directives(site: Site) -> None:
    site.run(BEFORE)
    site.sbatch(
        "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --stage=/shared/data:/nvme/alice/data\n"
        "#SBATCH --stage=/shared/weights.pt:/nvme/alice/\n"
    ).wait()
    site.run("echo x >/shared/data/a")
    found = [one for page in SHOWN for one in examples(page)]
    assert len(found) == len(SHOWN)
    script = [
        "#!/bin/bash",
        "#SBATCH --nodes=4",
        *(line for asked, _ in found for line in asked),
    ]
    job = site.sbatch("\n".join([*script, "head -2 $STAGE_SHARDS"]))
    job.wait()
    printed = job.output().splitlines()
    expected = [alike(line) for _, lines in found for line in lines]
    assert [alike(line) for line in printed if line.startswith("stage: ")] == expected
    (listed,) = (one for one in said(f"{DOCS}/guide/dataset-parts.md") if "head" in one.command)
    columns = re.compile(r"n[1-4]\t\d+\tpart-00[0-3]\.tar")
    assert all(map(columns.fullmatch, [*listed.output.splitlines(), *printed[-2:]]))


def test_the_next_job_gets_its_copy_of_the_store(site: Site) -> None:
    """On a site that gives each job a folder; how DST is made depends on the disk's filesystem."""
    ((asked, shown),) = examples(f"{DOCS}/guide/paths-and-arrays.md")
    site.run("python3 -m venv --without-pip /shared/env")
    made = re.compile(r"alice\.\d+\.\d|\b(?:reflink|hard link|copy) (?=of the node's copy)")
    with shapes.alliance(site) as shape:
        site.write_policy(f'{shape.policy()}[cache]\nstore = "{shape.disk}"\n')
        for _ in range(2):
            job = site.sbatch("\n".join(["#!/bin/bash", "#SBATCH --nodes=4", *asked]))
            job.wait()
        printed = job.output().splitlines()
    assert [made.sub("", alike(line)) for line in printed] == [made.sub("", alike(*shown))]


def test_the_first_job_is_as_shown(site: Site) -> None:
    """Where a page has the number of a job, that of the job is written."""
    page = f"{DOCS}/start/first-job.md"
    site.run("mkdir -p /shared/alice; head -c 16M /dev/urandom >/shared/alice/img.sqsh")
    (script,) = (block for block in blocks(page) if block.info.endswith(" job.sh"))
    site.run("cat >job.sh", input=script.text)
    path = {"PATH": f"{PREFIX}/bin:/usr/bin:/bin"}
    number = given = ""
    for command, output in said(page):
        typed = command.replace(f"-{number}.out", f"-{given}.out")
        done = site.run(f"({typed}) 2>&1", env=path, check=False)
        lines = [line for line in done.stdout.splitlines() if not line.startswith("srun: ")]
        if output.startswith("Submitted batch job "):
            number, given = (text.split()[-1] for text in (output, *lines))
        else:
            assert [*map(without_figures, lines)] == without_figures(output).splitlines()


@pytest.mark.parametrize("name", RUN)
def test_the_commands_of_a_page_end_well(site: Site, name: str) -> None:
    """What a shell of salloc gets is given to salloc. The output is compared where there is one."""
    site.run("mkdir -p /shared/alice/set /shared/alice/env /shared/alice/more")
    site.run("for name in img.sqsh set/a env/a more/a; do echo x >/shared/alice/$name; done")
    site.run("cat >job.sh", input="#!/bin/bash\nls /nvme/alice/*/a\n")
    job = site.sbatch("sleep 1000", "--nodes=2", "--overcommit") if "interactive" in name else None
    path, shell = {"PATH": f"{PREFIX}/bin:/usr/bin:/bin"}, ""
    for command, output in said(f"{DOCS}/{name}.md"):
        if command.startswith(NOT_RUN):
            continue
        typed = shell + command.replace("sbatch ", "sbatch --wait ").replace("200G", "1M")
        shell = f"{command} " if command.startswith("salloc ") and "stagectl" not in command else ""
        if not shell:
            done = site.run(typed.replace("--job 17", f"--job {job and job.id}"), env=path)
            assert done.stdout == output or not output
    if job:
        job.cancel()
