"""The plugin with the address and undefined behaviour sanitizers, in Slurm's own processes."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import CommandFailed
from tests.cluster.site import POLICY, PREFIX, REPOSITORY, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined"
#: Slurm's programs are not built with the sanitizer, and do not free all that they have.
OPTIONS = "detect_leaks=0:log_path=/shared/sanitizer:verify_asan_link_order=0"
ENVIRONMENT = {"ASAN_OPTIONS": OPTIONS, "UBSAN_OPTIONS": f"print_stacktrace=1:{OPTIONS}"}


class SanitizedSite(Site):
    """A site whose plugin reports what it does wrong to files in /shared."""

    def _start_slurmd(self, node: str) -> None:
        settings = [f"{name}={value}" for name, value in self.environment().items()]
        self._start_daemon(f"slurmd-{node}", node, ["env", *settings, "slurmd", "-D", "-N", node])

    def environment(self) -> dict[str, str]:
        """What loads the sanitizer into a program."""
        names = ("libasan.so", "libubsan.so")
        libraries = [
            subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
            for name in names
        ]
        return {**ENVIRONMENT, "LD_PRELOAD": " ".join(libraries)}

    def sanitize(self) -> None:
        """Replace the plugin by one with sanitizers."""
        build = f"{PREFIX}/sanitized"
        make = ["make", "-C", f"{REPOSITORY}/prolog/spank", f"BUILD={build}", f"CFLAGS={FLAGS}"]
        self.run(make, user="root")
        # The helper's srun loads the plugin too, and takes its environment from the policy alone.
        settings = ", ".join(f'{name} = "{value}"' for name, value in self.environment().items())
        self.write_policy(f"{POLICY}[launch]\nenvironment = {{ {settings} }}\n")
        self.run(["cp", f"{build}/spank_stage.so", f"{PREFIX}/lib/spank_stage.so"], user="root")

    def reports(self) -> list[str]:
        """What the sanitizers found."""
        return [path.read_text() for path in self.path("login", "/shared").glob("sanitizer.*")]


@pytest.fixture(scope="module")
def sanitized() -> Iterator[SanitizedSite]:
    with SanitizedSite(2) as site:
        site.sanitize()
        site.path("login", "/shared/data").write_text("data\n" * 1000)
        yield site


def test_jobs_of_all_kinds_find_no_fault(sanitized: SanitizedSite) -> None:
    use = "cmp /shared/data /nvme/data"
    script = f"#!/bin/bash\n#STAGE /shared/data /nvme/data\nsrun {use}\n"
    environment = sanitized.environment()
    for options in ([], ["--stage=/shared/data:/nvme/b", "--stage=/shared/data:/nvme/c"]):
        job = sanitized.sbatch(script, "-N2", *options, env=environment)
        assert job.wait().exit_code == "0:0", job.output()
    line = ["srun", "-N2", "--ntasks-per-node=2", "--stage=/shared/data:/nvme/data", *use.split()]
    sanitized.run(line, env=environment)
    for value in ("x", "/a:/nvme/b,c=d", "/shared/none:/nvme/n"):
        with pytest.raises(CommandFailed):
            sanitized.run(["srun", "-N2", f"--stage={value}", "true"], env=environment)
    assert sanitized.reports() == []


def test_the_sanitizer_is_in_the_processes_that_run_the_plugin(sanitized: SanitizedSite) -> None:
    seen = sanitized.run(
        "LD_PRELOAD= nm -D /opt/slurm-stage/lib/spank_stage.so | grep -c __asan_report"
    )
    assert int(seen.stdout) > 0
    slurmd = sanitized.run("grep -c libasan /proc/$(pgrep -o slurmd)/maps", user="root", on="n1")
    assert int(slurmd.stdout) > 0
