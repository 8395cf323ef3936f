"""An object in a store, and many small ones, by several numbers of readers and of requests.

``python -m tests.bench.sources`` runs several rounds of each way in turn, in one job on the test
cluster, beside one download and a broadcast afterwards. The store is nginx (`store`): each request
is answered late, and each connection is held to a rate, as those of stores are. ``--rate 0`` leaves
both out: then the cores of the machine are the limit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tests.bench import store
from tests.bench.bench import ALONE, OURS, run_rounds, table
from tests.cluster.servers import running
from tests.cluster.site import POLICY, PYTHON, REPOSITORY, STAGECTL, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
COPY, FOLDER = "/nvme/object.bin", "/nvme/objects"
#: sbcast sends what lies on the first node; slurm-stage only what all nodes can see.
LOCAL, SHARED = "/nvme/download/object.bin", "/shared/download/object.bin"
#: Readers and requests of each way; "auto" is the default.
NUMBERS = {
    OURS: ('"auto"', 8),
    "1 reader, 1 request": (1, 1),
    "1 reader, 8 requests": (1, 8),
    "4 readers, 1 request": (4, 1),
    "4 readers, 8 requests": (4, 8),
}
SMALL = "the same bytes in small objects"
#: Eight requests at once, each written in its place.
DOWNLOAD = """
mkdir -p $(dirname {file}); rm -f {file}
part=$(( ({size} + 7) / 8 )); seq 0 7 | xargs -P8 -I@ sh -c \
'curl -sf -r $((@ * '$part'))-$((@ * '$part' + '$part' - 1)) {url} | dd of={file} bs=1M \
iflag=fullblock oflag=seek_bytes seek=$((@ * '$part')) conv=notrunc status=none'
test $(stat -c %s {file}) = {size}
"""


def policy_of(endpoint: str, readers: object, requests: int) -> str:
    """Return the text of a stage.toml."""
    return (
        f'{POLICY}[source]\nallow = ["s3://bucket/", "{endpoint}/"]\nendpoints = ["{endpoint}"]\n'
        f"requests = {requests}\n[transfer]\nreaders = {readers}\n"
    )


def ways(site: Site, endpoint: str, size: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each way's name and shell commands: untimed preparation, timed command."""
    each = f"srun -N{len(site.nodes)} -n{len(site.nodes)} --ntasks-per-node=1"
    clean = f"{each} rm -rf {COPY} {FOLDER} /nvme/download"
    given = (
        f"set -o pipefail; export AWS_ENDPOINT_URL={endpoint} AWS_ACCESS_KEY_ID=a "
        "AWS_SECRET_ACCESS_KEY=b AWS_REGION=c"
    )
    summed = f'{PYTHON} -c "{ALONE}"'
    for number, (name, (readers, requests)) in enumerate(NUMBERS.items()):
        path = f"/shared/policy-{number}.toml"
        site.shared(Path(path).name).write_text(policy_of(endpoint, readers, requests))
        stage = f"{STAGECTL} stage --config {path} --json"
        run = f"{given}; {stage} s3://bucket/object.bin:{COPY} | {summed}"
        yield name, {"before": clean, "run": run}
        if name == OURS:
            run = f"{given}; {stage} s3://bucket/small/:{FOLDER} | {summed}"
            yield SMALL, {"before": clean, "run": run}
    url = f"{endpoint}/bucket/object.bin"
    local, shared = (
        f"set -e; {DOWNLOAD.format(size=size, url=url, file=file).strip()}"
        for file in (LOCAL, SHARED)
    )
    yield (
        "download, then slurm-stage",
        {
            "before": clean,
            "run": f"{shared}; {STAGECTL} stage {SHARED}:{COPY}",
        },
    )
    yield (
        "download, then sbcast",
        {
            "before": clean,
            "run": f"{local}; sbcast -f {LOCAL} {COPY}",
        },
    )
    yield "download alone", {"before": clean, "run": local}


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--size", type=int, default=400, help="MB in all")
    parser.add_argument("--small", type=int, default=1_000_000, help="bytes of a small object")
    parser.add_argument("--rate", type=int, default=10, help="MiB/s of a connection; 0: no limit")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds until an answer begins")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=REPOSITORY / "build" / "sources.json")
    options = parser.parse_args()
    size = options.size * 1_000_000
    with Site(options.nodes, "tmpfs") as site:
        folder = site.shared("store")
        files = "/shared/store/www/bucket"
        site.run(
            f"mkdir -p {files}/small; head -c {size} /dev/urandom >{files}/object.bin; "
            f"split -a5 -b {options.small} {files}/object.bin {files}/small/; "
            "chmod -R a+rX /shared/store; mkdir -m 777 /shared/download",
            user="root",
            timeout=600,
        )
        config = store.CONFIG.format(folder="/shared/store", rate=f"{options.rate}m")
        (folder / "nginx.conf").write_text(config)
        shutil.copy(HERE / "store.py", folder)
        port = 8081 if options.rate else 8080
        lister = ["python3", "/shared/store/store.py", files, "8082", "8083", str(options.delay)]
        with (
            running(site, lister, 8083),
            running(site, ["nginx", "-c", "/shared/store/nginx.conf"], 8080),
        ):
            found = run_rounds(site, dict(ways(site, f"http://login:{port}", size)), options.rounds)
    held = f"{options.rate} MiB/s a connection, {options.delay} s late" if options.rate else "free"
    Console().print(table(found, f"{size} bytes, {options.nodes} nodes, {held}"))
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
