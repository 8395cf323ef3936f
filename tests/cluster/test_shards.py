"""mode=shard: a folder spread over the nodes, each file on one of them."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from typing import TYPE_CHECKING

from tests.cluster.watch import Watch

if TYPE_CHECKING:
    from tests.cluster.site import Site

FILES = 512
SOURCE, PARTS = "/shared/shards", "/nvme/shards"
WISH = f"--stage={SOURCE}:{PARTS},mode=shard"
LIST = f"{PARTS}/.stage-shards.tsv"
SIZE, TIME = r"\d+\.\d MiB", r"\d+\.\d s"


def make_source(site: Site) -> dict[str, int]:
    """Make a folder of alice's with files of random sizes; return the sizes by name."""
    site.run(f"rm -rf {SOURCE}; mkdir -p {SOURCE}/data")
    dice = random.Random(5)
    sizes = {f"data/part-{number:03}": dice.randrange(1, 60_000) for number in range(FILES)}
    uid = site.shared("shards").stat().st_uid
    for name, size in sizes.items():
        path = site.shared("shards") / name
        path.write_bytes(dice.randbytes(size))
        os.chown(path, uid, uid)
    return sizes


def stage(site: Site, script: str, *options: str) -> str:
    job = site.sbatch(script, *options)
    assert (job.wait().exit_code, job.output()) == ("0:0", job.output())
    assert site.leftovers() == []
    return job.output()


def parts(site: Site) -> dict[str, set[str]]:
    """Return the names of the files that each node holds."""
    return {
        node: {f"data/{path.name}" for path in (site.copy(node, PARTS) / "data").iterdir()}
        for node in site.nodes
    }


def test_each_file_is_on_one_node_and_read_once(site: Site) -> None:
    sizes = make_source(site)
    with Watch(site.shared("shards") / "data") as watch:
        output = stage(site, "true", "-N4", WISH)
    assert watch.opened == FILES
    spread = rf"{FILES} files, {SIZE} from {SOURCE} spread over n\[1-4\] \(4 nodes\)"
    assert re.fullmatch(
        rf"stage: {PARTS}: {spread}, {SIZE}( to {SIZE})? on each, in {TIME}\n", output
    )
    found = parts(site)
    assert Counter(name for names in found.values() for name in names) == Counter(list(sizes))
    loads = [sum(sizes[name] for name in names) for names in found.values()]
    assert max(loads) - min(loads) <= 0.05 * sum(loads) / 4
    for node, names in found.items():
        for name in names:
            source = (site.shared("shards") / name).read_bytes()
            assert (site.copy(node, PARTS) / name).read_bytes() == source
    site.assert_healthy()


def test_the_list_of_parts_is_at_the_destination_and_in_the_environment(site: Site) -> None:
    sizes = make_source(site)
    script = 'echo "batch $STAGE_SHARDS"; srun sh -c \'echo "$SLURMD_NODENAME $STAGE_SHARDS"\''
    _, batch, *tasks = stage(site, script, "-N4", WISH).splitlines()
    assert batch == f"batch {LIST}"
    assert sorted(tasks) == [f"{node} {LIST}" for node in site.nodes]
    owners = {name: node for node, names in parts(site).items() for name in names}
    expected = "".join(f"{owners[name]}\t{sizes[name]}\t{name}\n" for name in sorted(sizes))
    for node in site.nodes:
        assert site.copy(node, LIST).read_text() == expected
    # Without a spread folder the variable is not set.
    assert stage(site, 'echo "<$STAGE_SHARDS>"', "-N1") == "<>\n"


def test_a_job_on_fewer_nodes_moves_only_files_of_the_missing_node(site: Site) -> None:
    sizes = make_source(site)
    stage(site, "true", "-N4", WISH)
    before = parts(site)
    lost = sum(sizes[name] for name in before["n4"])
    with Watch(site.shared("shards") / "data") as watch:
        output = stage(site, "true", "-N3", "-w", "n[1-3]", WISH)
    assert watch.opened == len(before["n4"])
    moved = f"{len(before['n4'])} files, {lost / (1 << 20):.1f} MiB"
    kept = FILES - len(before["n4"])
    assert output.startswith(f"stage: {PARTS}: {moved} ({kept} files kept) from {SOURCE} spread")
    after = parts(site)
    assert all(before[node] <= after[node] for node in ("n1", "n2", "n3"))
    assert set.union(*(after[node] for node in ("n1", "n2", "n3"))) == set(sizes)
    assert "nothing moved (512 files" in stage(site, "true", "-N3", "-w", "n[1-3]", WISH)


def test_a_pattern_decides_the_node_of_a_file(site: Site) -> None:
    make_source(site)
    stage(site, "true", "-N4", f"{WISH},by=part-{{n}}")
    for number, names in enumerate(parts(site).values()):
        assert names == {f"data/part-{file:03}" for file in range(number, FILES, 4)}
    job = site.sbatch("true", "-N4", f"{WISH},by=shard-{{n}}")
    assert job.wait().exit_code == "2:0"
    assert job.output() == (
        f"stage: n1: {SOURCE}/data/part-000 does not match by=shard-{{n}}; "
        "leave it out by exclude=\n"
        "stage: the job's own program was not started (exit code 2)\n"
    )
