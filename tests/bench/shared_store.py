"""``python -m tests.bench.shared_store``: compressed objects fill a disk that all nodes see.

As CosmoFlow's: many objects of gzip, decompressed on the way, by slurm-stage and by a script, in
which each node downloads its share by curl and decompresses it by gunzip; from Azurite, and from a
folder. Beside them reading, decompressing and writing alone, of which each node does its share.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import statistics
import subprocess
import sys
import time
import zlib
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import obstore
from obstore.store import AzureStore
from rich.console import Console
from rich.table import Table

from tests.bench.bench import OURS
from tests.bench.moosefs import HOST, Filesystem, make_network, moosefs
from tests.bench.shared import Results, run_ranks, shell, stage, table
from tests.cluster.servers import AZURITE, BLOB_PORT, MAKE_CONTAINER
from tests.cluster.site import REPOSITORY
from tests.support.disks import ext4

if TYPE_CHECKING:
    from collections.abc import Iterator

ACCOUNT, CONTAINER, PREFIX = "ouraccount", "data", "set"
#: Of each node's script: how many files it works at once.
_AT_ONCE = 2


def make_files(folder: Path, count: int, size: int) -> None:
    """Write files of ``size`` bytes, and the same compressed: small numbers of 16 bits each."""
    dice = random.Random(0)
    counts = bytes(max(0, int(dice.expovariate(0.25)) - 2) for _ in range(256))
    for name in ("plain", "zipped"):
        (folder / name).mkdir()
    for number in range(count):
        data = bytearray(size)
        data[::2] = dice.randbytes(size // 2).translate(counts)
        compressor = zlib.compressobj(1, wbits=31)
        (folder / f"plain/{number:04}").write_bytes(data)
        zipped = compressor.compress(data) + compressor.flush()
        (folder / f"zipped/{number:04}.gz").write_bytes(zipped)


@contextmanager
def azurite(log: Path) -> Iterator[dict[str, str]]:
    """Run a server of Azure's blobs; yield what a user's environment has to read them."""
    key = base64.b64encode(os.urandom(32)).decode()
    endpoint = f"http://{HOST}:{BLOB_PORT}/{ACCOUNT}"
    given = {"AZURE_STORAGE_ACCOUNT_KEY": key, "AZURE_STORAGE_ENDPOINT": endpoint}
    line = ["node", f"{AZURITE}", "--inMemoryPersistence"]
    line += ["--blobHost", HOST, "--blobPort", f"{BLOB_PORT}"]
    with log.open("w") as output:
        server = subprocess.Popen(
            line, stdout=output, env=os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"}
        )
    try:
        while "successfully listen" not in log.read_text():
            assert server.poll() is None, "Azurite has ended"
            time.sleep(0.1)
        names = {"account": ACCOUNT, "endpoint": endpoint, "container": CONTAINER}
        program = MAKE_CONTAINER.format(**names)
        subprocess.run([sys.executable, "-c", program], env=os.environ | given, check=True)
        yield given
    finally:
        server.terminate()
        server.wait()


def put_all(folder: Path, given: dict[str, str], names: Path) -> None:
    """Put the files into the store, and write URLs that all may read for an hour to ``names``."""
    store = AzureStore(
        CONTAINER,
        account_name=ACCOUNT,
        account_key=given["AZURE_STORAGE_ACCOUNT_KEY"],
        endpoint=given["AZURE_STORAGE_ENDPOINT"],
        client_options={"allow_http": True},
    )
    paths = []
    for file in sorted(folder.iterdir()):
        paths.append(f"{PREFIX}/{file.name}")
        obstore.put(store, paths[-1], file.read_bytes())
    urls = obstore.sign(store, "GET", paths, timedelta(hours=1))
    names.write_text("".join(f"{url}\n" for url in urls))


def ways(folder: Path) -> dict[str, dict[str, object]]:
    """Return all ways."""
    zipped, urls = folder / "zipped", folder / "urls"
    decompress = {"decompress": ["*.gz"]}
    mine = 'awk "NR % $RANKS == $RANK"'
    of_urls, of_files = f"{mine} {urls}", f"ls {zipped}/*.gz | {mine}"
    many = f"xargs -P{_AT_ONCE} -n1 bash -eo pipefail -c"
    name = "n=${0##*/}; n=${n%%.gz*}"
    return {
        f"{OURS}, from the store": stage(f"az://{ACCOUNT}/{CONTAINER}/{PREFIX}/", **decompress),
        "script: curl, gunzip": shell(
            f"""mkdir -p $COPY; {of_urls} | {many} '{name}; curl -sf "$0" | gunzip >$COPY/$n'"""
        ),
        "reading alone: curl": shell(
            f"""{of_urls} | sed 's,.*,url="&"\\noutput=/dev/null,' | curl -sfK -"""
        ),
        f"{OURS}, from the folder": stage(zipped, **decompress),
        "script: gunzip": shell(
            f"mkdir -p $COPY; {of_files} | {many} '{name}; gunzip <$0 >$COPY/$n'"
        ),
        "decompressing alone": shell(f"{of_files} | xargs gunzip -c >/dev/null"),
        "writing alone: cp": shell(
            f"mkdir -p $COPY; ls {folder}/plain/* | {mine} | xargs cp -t $COPY"
        ),
    }


def growth(kept: dict[int, Results], size: int, zipped: int, rate: float) -> Table:
    """Return a table of ours by the number of nodes, beside a model in which their links bound.

    Of n nodes each reads one nth from the store; of what it writes, one nth is for its own disk.
    """
    title = f"{OURS}, from the store, links of {rate / 1e6} MB/s"
    shown = Table(title=title, title_justify="left")
    for header in ("nodes", "seconds", "model", "ratio", "received", "model", "ratio", "written"):
        shown.add_column(header, justify="right")
    for ranks, results in kept.items():
        runs = [one for one in results if one["way"] == f"{OURS}, from the store"]
        found = {
            figure: statistics.median(one[figure] for one in runs)
            for figure in ("seconds", "received", "written")
        }
        model = (zipped + size * (1 - 1 / ranks)) / ranks
        shown.add_row(
            f"{ranks}",
            f"{found['seconds']:.1f} s", f"{model / rate:.1f} s",
            f"{found['seconds'] / model * rate:.2f}",
            f"{found['received'] / 1e6:.0f} MB", f"{model / 1e6:.0f} MB",
            f"{found['received'] / model:.2f}",
            f"{found['written'] / 1e6:.0f} MB",
        )  # fmt: skip
    return shown


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--objects", type=int, default=512)
    parser.add_argument("--size", type=int, default=4_000_000, help="bytes of one, decompressed")
    parser.add_argument("--moosefs", metavar="FOLDER", help="with the disks of MooseFS's nodes")
    parser.add_argument("--rate", type=float, default=0, help="MB/s of each link, with MooseFS")
    parser.add_argument("--only", nargs="+", default=[""], help="ways by a part of their names")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "build" / "shared_store.json")
    options = parser.parse_args()
    size = options.objects * options.size
    make_network()
    kept: dict[int, Results] = {}
    with ExitStack() as stack:
        disk: Path | Filesystem
        if options.moosefs:
            folder = Path(stack.enter_context(TemporaryDirectory(dir=options.moosefs)))
            folder.chmod(0o755)
        else:
            mounted = stack.enter_context(ext4(str(2 * size + (1 << 30))))
            disk, folder = mounted, mounted.parent
        make_files(folder, options.objects, options.size)
        zipped = sum(one.stat().st_size for one in (folder / "zipped").iterdir())
        log = folder / "azurite.log"
        given = stack.enter_context(azurite(log))
        # In another process: one that has threads cannot leave its mounts.
        arguments = folder / "zipped", given, folder / "urls"
        putting = get_context("spawn").Process(target=put_all, args=arguments)
        putting.start()
        putting.join()
        assert not putting.exitcode
        chosen = {
            name: way
            for name, way in ways(folder).items()
            if any(part in name for part in options.only)
        }
        for ranks in options.ranks:
            with ExitStack() as nodes:
                if options.moosefs:
                    name = nodes.enter_context(TemporaryDirectory(dir=folder))
                    disk = nodes.enter_context(moosefs(Path(name), ranks, options.rate))
                kept[ranks] = run_ranks(
                    folder, disk, chosen, ranks=ranks, rounds=options.rounds,
                    environment=given, log=str(log),
                )  # fmt: skip
            title = f"{options.objects} objects, {size} bytes, compressed {zipped}, {ranks} nodes"
            Console().print(table(kept[ranks], title))
    if options.rate:
        Console().print(growth(kept, size, zipped, options.rate * 10**6))
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(kept, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
