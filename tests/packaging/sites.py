"""A site's first staged job: each command that the documents name, in a root of a Debian.

``make test-packages`` runs this; ``make test`` does not, as it takes minutes and the network. The
roots are made once, in build/packages, and the packages are built in a root of their own. What a
test changes is lost at its end. Its Slurm has one node, and no network but its own.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]
ROOTS = REPOSITORY / "build/packages"
#: What is mounted there is seen by one script alone.
WORK = ROOTS / "work"
PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PAGES = REPOSITORY / "slurm-config/docs"
pytestmark = [pytest.mark.install, pytest.mark.root]

#: What a Debian has before slurm-stage, where site.sh makes a site of it.
BEFORE = "slurmctld slurmd slurm-client munge systemd ca-certificates iproute2 procps"
#: What packages are built with, and in a root of their own alone.
BUILD = "build-essential debhelper libslurm-dev python3-venv pkgconf rpm"
#: What a site with RPM has besides: its tools, and what the packages need there.
WITH_RPM = "rpm dnf rpmlint python3 openmpi-bin libpmix-dev"
#: The Debian whose rpm and dnf are used.
OF_RPM = "bookworm"

#: Enters the root ``$0``, whose changes are in memory, mounted at ``$1``; runs ``$4``, with ``$2``
#: at /source and ``$3`` at /packages. What pip and apt need of this machine is there too; apt's
#: cache is kept.
ENTER = """\
root=$0 work=$1 source=$2 packages=$3 script=$4
mount --make-rprivate /
mount -t tmpfs none "$work"
mkdir "$work/changes" "$work/work" "$work/root"
mount -t overlay none -o "lowerdir=$root,upperdir=$work/changes,workdir=$work/work" "$work/root"
cd "$work/root"
mkdir -p source packages opt
cp --dereference /etc/resolv.conf /etc/hosts etc
mkdir -p etc/ssl/certs
mount --bind -o ro "$source" source
mount --bind "$packages" packages
mount --bind -o ro /opt opt
mount --bind -o ro /etc/ssl/certs etc/ssl/certs
cp /etc/pip.conf etc 2>/dev/null || true
mount --bind "$root/var/cache/apt" var/cache/apt
mount --bind "$root/var/lib/apt/lists" var/lib/apt/lists
mount --rbind /sys sys
mount -t proc none proc
mount -t tmpfs none dev
for name in null zero full random urandom tty; do
    touch dev/$name
    mount --bind /dev/$name dev/$name
done
mkdir dev/shm dev/pts
mount -t tmpfs -o mode=1777 none dev/shm
mount -t devpts -o newinstance,ptmxmode=666 none dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
for name in run tmp; do mount -t tmpfs none $name; done
chmod 1777 tmp
pivot_root . .
umount --lazy .
cd /
exec bash -euc "$script"
"""


def in_root(suite: str, packages: Path, script: str, *, network: bool = False) -> str:
    """Run a script of bash in a root that forgets what it changes. Return its output."""
    spaces = ["--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
    spaces += [] if network else ["--net"]
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    folders = [ROOTS / suite, WORK, REPOSITORY, packages]
    done = subprocess.run(
        ["unshare", *spaces, "sh", "-euc", ENTER, *folders, script],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
        env={"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root", "SLURM_TIME_FORMAT": "", **pip},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def make_root(suite: str) -> None:
    """Make the root of a Debian with `BEFORE`, and its list of packages."""
    root = ROOTS / suite
    if not (root / "made").exists():
        subprocess.run(["rm", "-rf", root], check=True)
        line = ["mmdebstrap", "--quiet", "--mode=root", "--variant=apt"]
        line += ["--dpkgopt=force-unsafe-io", f"--include={BEFORE.replace(' ', ',')}"]
        subprocess.run([*line, suite, root], check=True)
        (root / "made").touch()


#: Builds the packages, and twice those for RPM: the second ones are a later version.
BUILDING = f"""\
export DEBIAN_FRONTEND=noninteractive PYTHON=/usr/bin/python3
apt-get -qq update
apt-get -qq install --no-install-recommends {BUILD} >/dev/null
cp -R /source/packaging /source/prolog /source/stager /source/slurm-config /source/*.md \\
    /source/LICENSE /source/pyproject.toml /tmp
packaging=/tmp/packaging
$packaging/install --download=/tmp/wheels
DPKG_DEB_COMPRESSOR_LEVEL=0 $packaging/deb/build /tmp/wheels /source/build/docs /packages/deb
"""
BUILDING_RPM = """\
$packaging/rpm/build /tmp/wheels /source/build/docs /packages/rpm
sed -i 's/^version = .*/version = "9.0"/' /tmp/pyproject.toml
$packaging/rpm/build /tmp/wheels /source/build/docs /packages/later
"""
#: Fetches what the installation needs, as a site has no network here; in a root that has nothing of
#: what packages are built with.
FETCHING = f"""\
export DEBIAN_FRONTEND=noninteractive
apt-get -qq install --download-only /packages/deb/*.deb
apt-get -qq install --no-install-recommends --download-only {WITH_RPM}
"""


@pytest.fixture(scope="session")
def _alone() -> Iterator[None]:
    """Wait until no other run of these tests uses the roots."""
    WORK.mkdir(parents=True, exist_ok=True)
    with open(ROOTS / ".lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session", params=["bookworm", "trixie"])
def debian(request: pytest.FixtureRequest, _alone: None) -> str:
    """The name of a Debian whose root is made and whose packages are built."""
    suite: str = request.param
    make_root(suite)
    folder = built(suite)
    subprocess.run(["rm", "-rf", folder], check=True)
    folder.mkdir()
    in_root(suite, folder, BUILDING + (BUILDING_RPM if suite == OF_RPM else ""), network=True)
    in_root(suite, folder, FETCHING, network=True)
    return suite


def built(suite: str) -> Path:
    return ROOTS / f"{suite}-packages"


def commands(page: str, sign: str, title: str = "") -> list[str]:
    """Return the commands of a page, or of its section: of root, ``#``, or of a user, ``$``."""
    text = (PAGES / page).read_text()
    if title:
        text = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    blocks = re.findall("^ *```\n(.*?)^ *```$", text, re.M | re.S)
    found: list[str] = re.findall(rf"^ *{re.escape(sign)} (.*)$", "\n".join(blocks), re.M)
    assert found
    return found


QUICK_START = "start/admin-quick-start.md"
INSTALLED = commands(QUICK_START, "#", "2. Install them on the node")
STAGE_COMMAND, EVICT_COMMAND = commands(QUICK_START, "$", "3. Stage a file")
REMOVED = commands("admin/remove.md", "#")
STAGED = re.compile(
    r"stage: /nvme/bob/some-file: 28\.6 MiB from /shared/some-file to node1 in \S+ s \(\S+ MiB/s a "
    r"node\)\n-rw------- 1 bob bob 30000000 .* /nvme/bob/some-file\n"
)


def as_root(lines: list[str]) -> str:
    """Return a script of root's commands, which says nothing unless it fails."""
    quiet = 'run() { "$@" >/tmp/said 2>&1 || { cat /tmp/said; false; }; }\n'
    return quiet + "\n".join(f"run bash -euc {shlex.quote(line)}" for line in lines) + "\n"


SOURCED = ". /source/tests/packaging/site.sh\n"
#: Stages the first file.
STAGE = f"scontrol reconfigure\nidle\nas_bob {shlex.quote(STAGE_COMMAND)}\n"
EVICT = f"as_bob {shlex.quote(EVICT_COMMAND)}\n"
#: Ends with what is not as before.
COMPARE = """\
scontrol reconfigure
idle
as_bob srun true
files >/tmp/after
diff /tmp/before /tmp/after | sed -n 's/^\\([<>].*[^ ]\\) *$/\\1/p'
"""


#: What is not as before when the packages are removed: what belongs to the user and to the site.
LEFT = """\
< /nvme d 755 root
> /nvme d 1777 root
> /nvme/bob d 755 bob
> /nvme/bob/some-file f 600 bob
"""


def test_the_commands_of_the_document_install_and_stage_within_ten_minutes(debian: str) -> None:
    script = SOURCED + "cd /packages/deb; begun=$SECONDS\n" + as_root(INSTALLED) + STAGE
    said = in_root(debian, built(debian), script + "echo $((SECONDS - begun))\n" + EVICT)
    staged = STAGED.match(said)
    assert staged, said
    taken, *waited, evicted = said[staged.end() :].splitlines()
    assert all(line.startswith("srun: job ") for line in waited), said
    assert evicted == "stage: /nvme/bob/some-file: evicted on node1"
    seconds = int(taken)
    print(f"{debian}: {seconds} s from the first command to the end of the first staged job")
    assert seconds < 600


def test_the_commands_of_the_document_remove_all(debian: str) -> None:
    """On a site that had what the packages depend on and recommend, as that stays."""
    needed = "apt-get --simulate install --yes /packages/deb/*.deb | awk '/^Inst/ { print $2 }'"
    script = (
        f"DEBIAN_FRONTEND=noninteractive apt-get -qq install $({needed} | grep -v ^slurm-stage) "
        f">/dev/null 2>&1\n{SOURCED}cd /packages/deb\n" + as_root(INSTALLED) + STAGE
    )
    said = in_root(debian, built(debian), script + as_root(REMOVED) + COMPARE)
    staged = STAGED.match(said)
    assert staged, said
    assert said[staged.end() :] == LEFT


#: Has rpm and dnf of a Debian, and a package of no files that says for rpm what is there.
RPM_SITE = f"""\
export DEBIAN_FRONTEND=noninteractive
apt-get -qq install --no-install-recommends {WITH_RPM} >/dev/null 2>&1
echo 12 >/etc/dnf/vars/releasever
echo assumeyes=1 >>/etc/dnf/dnf.conf
cd /packages/rpm
libc=$(rpm --query --requires --package *.rpm | grep -E '^(libc[.]|rtld)' | sort -u | paste -sd ,)
cat >/tmp/system.spec <<END
Name: system
Version: 1
Release: 1
Summary: What a distribution has
License: MIT
BuildArch: noarch
Provides: slurm = $(slurmd -V | cut -d ' ' -f 2), /usr/bin/python3.11, /bin/sh, $libc
%description
What a distribution has.
%files
END
rpmbuild -bb --quiet --define '_rpmdir /tmp/rpm' /tmp/system.spec
rpmlint --config /source/packaging/rpm/rpmlint.toml *.rpm | tail -1 | cut -d ';' -f 1
dnf install ./slurm-stage*.rpm 2>&1 | grep -c 'nothing provides slurm '
dnf install /tmp/rpm/noarch/*.rpm >/tmp/said 2>&1 || cat /tmp/said
mkdir -p /usr/share/licenses /usr/lib64/slurm
{SOURCED}"""
#: A job that has staged goes on while the packages are replaced by later ones.
UPGRADE = """\
as_bob "sbatch --quiet --output=/tmp/job --stage=/shared/some-file:/nvme/bob/ --wrap \\
    'touch /tmp/begun; until [ -e /tmp/go ]; do sleep 0.1; done; stat -c %s /nvme/bob/some-file'"
until [ -e /tmp/begun ]; do sleep 0.1; done
dnf install /packages/later/*.rpm >/tmp/said 2>&1
rpm --query slurm-stage slurm-stage-plugin
as_bob touch /tmp/go
while squeue --noheader | grep -q .; do sleep 0.1; done
tail -1 /tmp/job
stagectl --version
"""


#: What `UPGRADE` prints.
UPGRADED = """\
slurm-stage-9.0-1.x86_64
slurm-stage-plugin-9.0-1.x86_64
30000000
9.0
"""


def test_packages_for_rpm_are_installed_upgraded_and_removed(debian: str) -> None:
    """In no distribution of RPM, as none can be had here, but by dnf and rpm of Debian."""
    if debian != OF_RPM:
        pytest.skip(f"Debian's rpm and dnf are those of {OF_RPM}")
    pages = ("admin/install-packages.md", "admin/remove.md")
    text = "".join((PAGES / page).read_text() for page in pages)
    install, remove = re.findall("`(dnf [^`]*)`", text)
    script = (
        RPM_SITE
        + as_root([install, *INSTALLED[1:]])
        + STAGE
        + UPGRADE
        + as_root([REMOVED[0], remove])
        + COMPARE
    )
    said = in_root(debian, built(debian), script)
    checked = " 2 packages and 0 specfiles checked\n"
    assert said.startswith(checked), said
    # Without Slurm neither package is installed.
    refused = "2\n"
    staged = STAGED.match(said, len(checked + refused))
    assert said[len(checked) :].startswith(refused), said
    assert staged, said
    kept = "> /etc/slurm/stage.toml.rpmsave f 644 root\n"
    left = re.sub("> [0-9a-f]{32}  /etc/slurm/stage.toml.rpmsave\n", "", said[staged.end() :])
    assert left == UPGRADED + kept + LEFT
