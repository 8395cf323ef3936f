"""Lists of directives on their way from a command line or a script to the nodes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import CommandFailed
from tests.cluster.site import PLUGSTACK, PYTHON
from tests.support.nightly import repeated

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.site import Site

#: Bytes of the longest list: STAGE_LIST_MAX of prolog/spank/stage.h.
MAX_LIST = 120 * 1024


def test_an_escaped_semicolon_does_not_separate_directives(site: Site) -> None:
    site.run("mkdir -p /shared/folder; echo kept > /shared/folder/file; echo step > /shared/a")
    # The pattern at the end of the job's only directive looks like a directive.
    listed = r"/shared/folder:/nvme/folder,exclude=x\;/shared/a\:/nvme/a"
    script = "cat /nvme/folder/file; srun --stage=/shared/a:/nvme/a cat /nvme/a"
    job = site.sbatch(script, "-N1", f"--stage={listed}")
    assert job.wait().exit_code == "0:0", job.output()
    own = [line for line in job.output().splitlines() if not line.startswith("stage:")]
    assert own == ["kept", "step"]


def test_a_blank_at_the_end_of_a_source_belongs_to_it(site: Site) -> None:
    site.run("echo plain > /shared/trail; echo blank > '/shared/trail '")
    script = """#STAGE /shared/trail :/nvme/a line \t
cat '/nvme/a line' /nvme/option; srun "--stage=/shared/trail :/nvme/step" cat /nvme/step"""
    job = site.sbatch(script, "-N1", "--stage=/shared/trail :/nvme/option")
    assert job.wait().exit_code == "0:0", job.output()
    own = [line for line in job.output().splitlines() if not line.startswith("stage:")]
    assert own == ["blank"] * 3


#: Stands in for the helper: checks nothing, fills nothing in, and prints what it gets in the job.
HELPER = """#!/bin/bash
if [ "$4" = check ]; then
	until [ "$1" = -- ]; do shift; done
	shift
	IFS=';'
	printf %s "$*"
fi
[ "$4" = gate ] || exit 0
list=$(printf %s "$STAGE_DIRECTIVES" | sha256sum)
lines=0
while [ $# -gt 0 ]; do
	[ "$1" = --script ] && [ "$2" ] && lines=$(grep -c '^#STAGE' "$2")
	shift
done
echo "list ${list%% *}, $lines lines" >&2
"""


@pytest.fixture
def helper(site: Site) -> Iterator[Site]:
    """The site with the plugin, but with a stand-in for the helper."""
    path = site.shared("helper")
    path.write_text(HELPER)
    path.chmod(0o755)
    site.write_plugstack(PLUGSTACK.replace(f"python={PYTHON}", "python=/shared/helper"))
    yield site
    site.write_plugstack(PLUGSTACK)


def arrived(text: str, lines: int = 0) -> str:
    """Return what the stand-in prints for a list and a number of #STAGE lines."""
    return f"list {hashlib.sha256(text.encode()).hexdigest()}, {lines} lines\n"


def long_list(length: int) -> str:
    """Return a list of directives of ``length`` bytes."""
    return f"/shared/{'a' * (length - 16)}:/nvme/a"


@pytest.mark.parametrize("length", [100 * 1024, MAX_LIST])
def test_a_long_list_reaches_the_helper(helper: Site, length: int) -> None:
    listed = long_list(length)
    option = f"--stage={listed}"
    job = helper.sbatch("echo task", "-N2", option)
    assert job.wait().exit_code == "0:0", job.output()
    assert job.output() == f"{arrived(listed)}task\n"
    for command in (["srun", "-N1", option], ["salloc", "-N1", option, "srun"]):
        assert arrived(listed) in helper.run([*command, "true"]).stderr


@pytest.mark.parametrize(
    "command", ["sbatch --wrap true", repeated("salloc true"), repeated("srun true")]
)
def test_a_list_that_is_too_long_is_refused_with_the_remedy(helper: Site, command: str) -> None:
    name, *rest = command.split()
    half = MAX_LIST // 2
    options = [f"--stage={long_list(half)}", f"--stage={long_list(half).replace('/a', '/b')}"]
    with pytest.raises(CommandFailed) as refused:  # the joining ';' is the one byte too many
        helper.run([name, *options, *rest])
    assert (refused.value.code, refused.value.stdout) == (2, "")
    assert refused.value.stderr == (
        f"stage: the --stage options are longer than {MAX_LIST} bytes together; write #STAGE lines "
        "in the batch script instead, or stage a folder or an archive\n"
    )


def test_many_options_reach_the_helper(helper: Site) -> None:
    values = [f"/shared/{number}:/nvme/{'a' * 400}{number}" for number in range(256)]
    job = helper.sbatch("true", "-N1", "--export=NONE", *[f"--stage={value}" for value in values])
    assert job.wait().exit_code == "0:0", job.output()
    assert job.output() == arrived(";".join(values))
    with pytest.raises(CommandFailed) as refused:
        helper.run(["sbatch", *[f"--stage={n}" for n in range(257)], "--wrap", "true"])
    assert "stage: more than 256 --stage options; join directives by ';'" in refused.value.stderr


def test_a_script_may_have_thousands_of_lines(helper: Site) -> None:
    comments = "# a comment\n\n" * 3000
    lines = "".join(f"#STAGE /shared/{n}:/nvme/{'a' * 100}{n}\n" for n in range(3000))
    job = helper.sbatch(f"#!/bin/bash\n{comments}{lines}echo task\n", "-N2")
    assert job.wait().exit_code == "0:0", job.output()
    assert job.output() == arrived("", 3000) + "task\n"
