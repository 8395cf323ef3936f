"""The plugin, compiled with sanitizers, in Slurm's own processes.

The address sanitizer's allocator does not survive slurmstepd's forks among threads: now and then a
task deadlocks in it, with any plugin. So it is used only where jobs are submitted; the sanitizer of
undefined behaviour, which leaves the allocator alone, is used everywhere.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cluster.cluster import CommandFailed
from tests.cluster.site import PREFIX, REPOSITORY, SOURCE, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

OK = "/shared/data:/nvme/data"
BAD = ("x", "/a:/nvme/b,c=d", "/a:/nvme/" + "b" * 125_000)


class SanitizedSite(Site):
    """A site whose plugin ends its process at the first fault."""

    def sanitize(self, kind: str, source: str = f"{SOURCE}/prolog/spank") -> dict[str, str]:
        """Replace the plugin by one with a sanitizer; return the environment that it needs."""
        build = f"{source}/{kind}"
        # A fault ends the process, and with it the job or the command.
        flags = f"-O1 -g -fsanitize={kind} -fno-sanitize-recover={kind}"
        make = ["make", "-C", source, f"BUILD={build}", f"CFLAGS={flags}"]
        self.run(make, user="root")
        self.run(["cp", f"{build}/spank_stage.so", f"{PREFIX}/lib/spank_stage.so"], user="root")
        return {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


@pytest.fixture(scope="module")
def sanitized() -> Iterator[SanitizedSite]:
    with SanitizedSite(2) as site:
        site.path("login", "/shared/data").write_text("data\n" * 1000)
        yield site


def test_submitting_jobs_causes_no_memory_error(sanitized: SanitizedSite) -> None:
    environment = sanitized.sanitize("address")
    library = ["gcc", "-print-file-name=libasan.so"]
    environment["LD_PRELOAD"] = subprocess.check_output(library, text=True).strip()
    for options in ([], [f"--stage={OK}"], [f"--stage={OK}", "--stage=/a:/nvme/b;/c:/nvme/d"]):
        held = ["sbatch", "--hold", "--parsable", *options, "--wrap", "true"]
        job = sanitized.run(held, env=environment).stdout.strip()
        sanitized.run(["scancel", job])
    for value in BAD:
        for command in (["srun", "true"], ["salloc", "true"], ["sbatch", "--wrap", "true"]):
            line = [command[0], f"--stage={value}", *command[1:]]
            with pytest.raises(CommandFailed) as refused:
                sanitized.run(line, env=environment)
            assert refused.value.code == 2


def test_jobs_cause_no_undefined_behaviour(sanitized: SanitizedSite) -> None:
    environment = sanitized.sanitize("undefined")
    script = "#!/bin/bash\n#STAGE /shared/data:/nvme/data\nsrun cmp /shared/data /nvme/data\n"
    for options in ([], ["--stage=/shared/data:/nvme/b", "--stage=/shared/data:/nvme/c"]):
        job = sanitized.sbatch(script, "-N2", *options, env=environment)
        assert job.wait().exit_code == "0:0", job.output()
    srun = ["srun", "-N2", "--ntasks-per-node=2"]
    sanitized.run([*srun, f"--stage={OK}", "cmp", "/shared/data", "/nvme/data"], env=environment)
    with pytest.raises(CommandFailed) as failed:
        sanitized.run([*srun, "--stage=/shared/none:/nvme/n", "true"], env=environment)
    assert failed.value.code == 4


def test_a_fault_would_have_ended_the_job(sanitized: SanitizedSite) -> None:
    """Check the tests themselves: build the plugin with a fault in its gate."""
    top = sanitized.path("login", "/shared/faulty")
    folder = top / "prolog/spank"
    shutil.copytree(f"{REPOSITORY}/prolog/spank", folder)
    shutil.copy(f"{REPOSITORY}/pyproject.toml", top)  # the Makefile reads the version there
    gate = (folder / "gate.c").read_text()
    fault = "volatile int most = 0x7fffffff;\n\tmost = most + 1;\n\n\tif (stage_options_helper()"
    assert gate.count("if (stage_options_helper()") == 1
    (folder / "gate.c").write_text(gate.replace("if (stage_options_helper()", fault))
    sanitized.sanitize("undefined", "/shared/faulty/prolog/spank")
    job = sanitized.sbatch("true", "-N1", f"--stage={OK}")
    assert job.wait().state == "FAILED"
