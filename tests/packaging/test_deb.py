"""The Debian packages are built as `make deb` does, and installed in a copy of this system."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.install, pytest.mark.root]


def run(*line: str | Path, **environment: str) -> str:
    """Run a program, which must succeed and say nothing on stderr. Return its output."""
    given = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **environment}
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=given)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both packages. Their compression is the quickest, as they are not kept."""
    folder = tmp_path_factory.mktemp("deb")
    index = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    download = f"--download={folder}/wheels"
    system = {"PYTHON": "/usr/bin/python3", "PATH": os.environ["PATH"], **index}
    subprocess.run([REPOSITORY / "packaging/install", download], check=True, env=system)
    subprocess.run(["make", "--silent", "-C", REPOSITORY, "docs"], check=True, env=system)
    given = [folder / "wheels", REPOSITORY / "build/docs", folder / "built"]
    offline: list[str | Path] = ["unshare", "--net", REPOSITORY / "packaging/deb/build", *given]
    built = run(*offline, DPKG_DEB_COMPRESSOR_LEVEL="0").splitlines()
    assert [name.partition("_")[0] for name in built] == ["slurm-stage-plugin", "slurm-stage"]
    return folder / "built"


def field(package: Path, name: str) -> str:
    return run("dpkg-deb", "--field", package, name).strip()


def package(packages: Path, name: str) -> Path:
    (found,) = packages.glob(f"{name}_*.deb")
    return found


def test_lintian_finds_nothing(packages: Path) -> None:
    (changes,) = packages.glob("*.changes")
    assert run("lintian", "--allow-root", "--fail-on", "error,warning", changes) == ""


def test_versions_and_dependencies_are_those_of_what_they_were_built_for(packages: Path) -> None:
    plugin, python = package(packages, "slurm-stage-plugin"), package(packages, "slurm-stage")
    project = (REPOSITORY / "pyproject.toml").read_text()
    found = re.search(r'^version = "(.*)"$', project, re.MULTILINE)
    assert found
    version = field(python, "Version")
    assert version.startswith(f"{found[1]}-1+")
    needed = field(plugin, "Depends").split(", ")
    assert f"slurm-stage (= {version})" in needed
    headers = run("dpkg-query", "--show", "--showformat=${Version}", "libslurm-dev")
    year, month = map(int, headers.split(".")[:2])
    assert f"slurm-wlm-basic-plugins (>= {year:02}.{month:02})" in needed
    assert f"slurm-wlm-basic-plugins (<< {year:02}.{month + 1:02}~)" in needed
    system = run("/usr/bin/python3", "-c", "import sys; print(sys.version_info[1])")
    needed = field(python, "Depends").split(", ")
    assert f"python3 (>= 3.{int(system)}~)" in needed
    assert f"python3 (<< 3.{int(system) + 1}~)" in needed


def test_manual_pages_and_completion_are_where_programs_look_for_them(packages: Path) -> None:
    found = {
        name: re.findall(
            "^-.* [.]/usr/share/((?:man|bash|fish|zsh).*)$",
            run("dpkg-deb", "--contents", package(packages, name)),
            re.MULTILINE,
        )
        for name in ("slurm-stage", "slurm-stage-plugin")
    }
    assert found == {
        "slurm-stage": [
            "bash-completion/completions/stagectl", "fish/vendor_completions.d/stagectl.fish",
            "man/man1/stagectl.1.gz", "man/man5/stage.toml.5.gz", "man/man7/slurm-stage.7.gz",
            "zsh/vendor-completions/_stagectl",
        ],
        "slurm-stage-plugin": ["man/man8/spank_stage.8.gz"],
    }  # fmt: skip


def test_each_link_of_the_site_leads_to_a_file_of_the_package(
    packages: Path, tmp_path: Path
) -> None:
    run("dpkg-deb", "--extract", package(packages, "slurm-stage"), tmp_path)
    site = tmp_path / "usr/share/doc/slurm-stage/html"
    pages = [*site.rglob("*.html")]
    assert site / "index.html" in pages
    for page in pages:
        links = re.findall(r'(?:href|src|url)="?([^"#?:>]+)[#?"]', page.read_text())
        assert [one for one in links if not (page.parent / one).is_file()] == [], page


#: Run in a root that is this system. Prints what the packages do, and which files are not as in
#: the system.
SITE = """\
changed() {
    find /tmp/changes ! -type d -printf '/%P\\n' | grep -vE '^/var/(lib/dpkg|log|cache)/' | sort
}
dpkg() { command dpkg --force-unsafe-io "$@" | grep '^slurm-stage' || true; }
printf 'ClusterName=test\\nSlurmctldHost=localhost\\nNodeName=localhost\\n' >/etc/slurm/slurm.conf
dpkg --install /tmp/debs/*.deb
stagectl --version
ls /usr/lib/slurm-stage/bin /usr/lib/slurm-stage/libexec | grep -v python
srun --help | grep -o -e --stage=SRC:DST
/usr/lib/slurm-stage/bin/python3 -I -m stager.node.prolog --config /etc/slurm/stage.toml 1
echo '# edited' >>/etc/slurm/stage.toml
dpkg --install /tmp/debs/*.deb
tail -1 /etc/slurm/stage.toml
slurm-stage disable
dpkg --install /tmp/debs/*.deb
srun --help | grep -c -e --stage || true
slurm-stage enable
mkdir -p /run/slurm-stage/jobs
dpkg --remove slurm-stage slurm-stage-plugin
changed
find /run -name "slurm*"
srun --help | grep -c -e --stage || true
dpkg --purge slurm-stage
changed
"""
PRINTED = """\
slurm-stage: /etc/slurm/plugstack.conf.d/00-slurm-stage.conf names \
/usr/lib/slurm-stage/lib/spank_stage.so, which Slurm can load
slurm-stage: set roots in /etc/slurm/stage.toml, then run: slurm-stage enable
0.1.0
/usr/lib/slurm-stage/bin:
stage-importer
stagectl

/usr/lib/slurm-stage/libexec:
beeond
job_epilog
job_prolog
moosefs
task_prolog
--stage=SRC:DST
slurm-stage: /etc/slurm/plugstack.conf.d/00-slurm-stage.conf names \
/usr/lib/slurm-stage/lib/spank_stage.so, which Slurm can load
slurm-stage: set roots in /etc/slurm/stage.toml, then run: slurm-stage enable
# edited
slurm-stage: /etc/slurm/plugstack.conf.d/00-slurm-stage.conf is removed: \
Slurm loads the plugin no more
slurm-stage: the plugin stays out of service; "slurm-stage enable" puts it in
0
slurm-stage: /etc/slurm/plugstack.conf.d/00-slurm-stage.conf names \
/usr/lib/slurm-stage/lib/spank_stage.so, which Slurm can load
slurm-stage: set roots in /etc/slurm/stage.toml, then run: slurm-stage enable
slurm-stage: /etc/slurm/plugstack.conf.d/00-slurm-stage.conf is removed: \
Slurm loads the plugin no more
/etc/slurm/slurm.conf
/etc/slurm/stage.toml
0
/etc/slurm/slurm.conf
"""


def test_every_module_is_compiled_and_is_loaded_whatever_its_time(packages: Path) -> None:
    """The second word of a compiled module is 1 if no time and no content is compared."""
    with (
        subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", package(packages, "slurm-stage")], stdout=subprocess.PIPE
        ) as unpacked,
        tarfile.open(fileobj=unpacked.stdout, mode="r|") as archive,
    ):
        held = {
            one.name: archive.extractfile(one).read(8)  # type: ignore[union-attr]
            for one in archive
            if one.name.endswith((".py", ".pyc"))
        }
    modules = {name for name in held if name.endswith(".py")}
    compiled = {cache for name in held if (cache := name).endswith(".pyc")}
    assert {f"{Path(name).parents[1]}/{Path(name).name.split('.')[0]}.py" for name in compiled} == {
        name.removeprefix("./") for name in modules
    }
    assert {held[name][4:] for name in compiled} == {b"\1\0\0\0"}


def test_installed_and_purged_it_leaves_nothing(packages: Path, tmp_path: Path) -> None:
    for name in ("kept", "root"):
        (tmp_path / name).mkdir()
    mount = (
        'cd "$0"; mount -t tmpfs none kept; mkdir kept/changes kept/work; '
        "mount -t overlay none -o lowerdir=/,upperdir=kept/changes,workdir=kept/work root; "
        "mount -t proc none root/proc; mount --rbind /dev root/dev; mount --rbind /sys root/sys; "
        "for name in run tmp; do mount -t tmpfs none root/$name; done; "
        "mkdir root/tmp/changes root/tmp/debs; mount --bind kept/changes root/tmp/changes; "
        'mount --bind "$1" root/tmp/debs; exec chroot root sh -euc "$2"'
    )
    isolated = ["unshare", "--mount", "--net", "--pid", "--fork", "sh", "-euc", mount]
    assert run(*isolated, tmp_path, packages, SITE) == PRINTED
