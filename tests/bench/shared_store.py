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

from tests.bench.bench import OURS
from tests.bench.moosefs import Filesystem, moosefs
from tests.bench.shared import run_ranks, shell, stage, table
from tests.cluster.servers import AZURITE, MAKE_CONTAINER
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
def azurite(log: Path, port: int) -> Iterator[dict[str, str]]:
    """Run a server of Azure's blobs; yield what a user's environment has to read them."""
    key = base64.b64encode(os.urandom(32)).decode()
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    given = {"AZURE_STORAGE_ACCOUNT_KEY": key, "AZURE_STORAGE_ENDPOINT": endpoint}
    line = ["node", f"{AZURITE}", "--inMemoryPersistence", "--blobPort", f"{port}"]
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


def main() -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--objects", type=int, default=512)
    parser.add_argument("--size", type=int, default=4_000_000, help="bytes of one, decompressed")
    parser.add_argument("--port", type=int, default=10123, help="of Azurite")
    parser.add_argument("--moosefs", metavar="FOLDER", help="with the disks of MooseFS's nodes")
    parser.add_argument("--only", default="", help="the ways whose names have this")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "build" / "shared_store.json")
    options = parser.parse_args()
    size = options.objects * options.size
    with ExitStack() as stack:
        disk: Path | Filesystem
        if options.moosefs:
            folder = Path(stack.enter_context(TemporaryDirectory(dir=options.moosefs)))
        else:
            disk = stack.enter_context(ext4(str(2 * size + (1 << 30))))
            folder = disk.parent
        make_files(folder, options.objects, options.size)
        log = folder / "azurite.log"
        given = stack.enter_context(azurite(log, options.port))
        # In another process: one that has threads cannot leave its mounts.
        arguments = folder / "zipped", given, folder / "urls"
        putting = get_context("spawn").Process(target=put_all, args=arguments)
        putting.start()
        putting.join()
        assert not putting.exitcode
        if options.moosefs:
            disk = stack.enter_context(moosefs(folder, options.ranks))
        chosen = {name: way for name, way in ways(folder).items() if options.only in name}
        found = run_ranks(
            folder, disk, chosen, ranks=options.ranks, rounds=options.rounds,
            environment=given, log=str(log),
        )  # fmt: skip
        zipped = sum(one.stat().st_size for one in (folder / "zipped").iterdir())
    title = f"{options.objects} objects, {size} bytes, compressed {zipped}, {options.ranks} nodes"
    Console().print(table(found, title))
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
