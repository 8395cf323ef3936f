"""The library that authenticates connections between ranks (prolog/peers), in real processes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

import pytest

from tests.support.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SOURCE = Path(__file__).parents[2] / "prolog/peers"
KEY, OTHER_KEY = "000102030405060708090a0b0c0d0e0f", "100102030405060708090a0b0c0d0e0f"
#: The addresses of two nodes, in IPv4 and IPv6, and other ones of the second.
A, B, A6, B6 = "10.77.0.1", "10.77.0.2", "fd77::1", "fd77::2"
OTHER, OTHER6 = "10.78.0.2", "fd78::2"
#: Each node is a network of its own. The first one makes the link to the second.
NODE = "ip link set lo up; echo ready; read -r go; {commands}; echo up; exec cat"
LINK = "ip link add eth0 type veth peer name eth0 netns {other}; " + "; ".join(
    ["ip link set eth0 up", f"ip address add {A}/24 dev eth0",
     f"ip address add {A6}/64 dev eth0 nodad"]
)  # fmt: skip
OTHER_END = "; ".join(
    ["ip link set eth0 up", f"ip address add {B}/24 dev eth0",
     f"ip address add {B6}/64 dev eth0 nodad", f"ip address add {OTHER}/32 dev lo",
     f"ip address add {OTHER6}/128 dev lo"]
)  # fmt: skip
#: Makes this process open its next sockets in the network of another one.
MOVE = """
import ctypes, os
def move(process):
    assert ctypes.CDLL(None).setns(os.open(f"/proc/{process}/ns/net", os.O_RDONLY), 0) == 0
"""
#: Listens on an address, and prints who sends what. How: a listener that blocks, that has a
#: timeout, that is polled, or that takes IPv4 in IPv6.
LISTEN = """
import select, socket, sys
address, port, how = sys.argv[1:]
family = socket.AF_INET6 if ":" in address else socket.AF_INET
listener = socket.create_server(
    ("" if how == "dual" else address, int(port)), family=family, dualstack_ipv6=how == "dual"
)
listener.settimeout({"timeout": 60, "polled": 0}.get(how))
print(listener.getsockname()[1], flush=True)
while True:
    if how == "polled":
        select.select([listener], [], [])
    try:
        connection, sender = listener.accept()
    except BlockingIOError:
        continue
    connection.setblocking(True)
    print(sender[0], connection.recv(100).decode(errors="replace"), flush=True)
    connection.send(b"an answer")
    connection.close()
"""
#: Connects from an address to another one and sends a text; prints the error if there is one.
CONNECT = """
import errno, socket, sys
source, target, port, how, text = sys.argv[1:]
connection = socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET)
connection.settimeout({"timeout": 60, "polled": 0}.get(how))
connection.bind((source, 0))
code = connection.connect_ex((target, int(port)))
connection.setblocking(True)
if code and code != errno.EINPROGRESS:
    sys.exit(errno.errorcode[code])
# Nothing more is sent if a program asks again.
assert code or connection.connect_ex((target, int(port))) in (0, errno.EISCONN)
try:
    connection.sendall(text.encode())
    connection.recv(1)
except ConnectionError:
    pass
"""
#: Tries all that a stranger may send, and waits for each end. Then prints how many it tried.
STRANGER = """
import os, socket, struct, sys, time
source, target, port = sys.argv[1:]
def connect():
    return socket.create_connection((target, int(port)), 60, (source, 0))
def await_end(connection):
    try:
        assert connection.recv(1) == b"", "the rank answered"
    except ConnectionError:
        pass
payloads = [bytes([value]) * size for value in (0, 46, 255) for size in range(1, 17)]
payloads += [os.urandom(size) for size in (15, 16, 17, 24, 100, 4096, 100_000)]
payloads += [b"OPAL-TCP-BTL\\0\\0\\0\\0", struct.pack("=II16s", 1, 0, b"OPAL-TCP-BTL")]
for payload in payloads:
    connection = connect()
    try:
        connection.sendall(payload)
    except ConnectionError:
        pass
    await_end(connection)
silent = [connect() for _ in range(50)]
for at_once in (b"", b"x", bytes(16)):
    connection = connect()
    connection.send(at_once)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
for half in (b"", b"x", bytes(16)):
    connection = connect()
    try:
        connection.send(half)
        connection.shutdown(socket.SHUT_WR)
    except OSError:  # it was closed already
        pass
    await_end(connection)
print(len(payloads) + 6, flush=True)
sys.stdin.read()
"""
#: Passes on between whoever connects to an address and the listener at another one. It connects
#: onward from another network.
RELAY = """
import socket, sys
address, source, target, port, network = sys.argv[1:]
listener = socket.create_server((address, 0))
print(listener.getsockname()[1], flush=True)
victim, _ = listener.accept()
move(network)
onward = socket.create_connection((target, int(port)), 60, (source, 0))
onward.sendall(victim.recv(100))
answer = b""
try:
    answer = onward.recv(100)
except ConnectionError:
    pass
print("answered" if answer else "closed", flush=True)
"""


@pytest.mark.parametrize(
    ("size", "tag"),
    [
        (0, "a3817f04ba25a8e66df67214c7550293"),
        (1, "da87c1d86b99af44347659119b22fc45"),
        (2, "8177228da4a45dc7fca38bdef60affe4"),
        (36, "3dc47d1f29c448461e9e76ed904f6711"),
        (56, "1938f2cf72d54ee97e94166fa91d2a36"),
        (60, "e3040c00eb28f15366ca73cbd872e740"),
        (63, "5150d1772f50834a503e069a973fbd7c"),
    ],
)
def test_siphash_gives_the_published_digests(tmp_path: Path, size: int, tag: str) -> None:
    with compiled("siphash", tmp_path, library="peers") as is_tag:
        assert is_tag(str(size), tag)
        assert not is_tag(str(size), tag[:-1] + ("0" if tag[-1] != "0" else "1"))


@dataclass(frozen=True, slots=True)
class Network:
    """Two nodes, by a process in the network of each, and the library."""

    first: int
    second: int
    library: Path

    def node(self, words: Iterable[object]) -> int:
        """Return the node that has the first of the addresses among ``words``; else the first."""
        for word in words:
            if word in (A, A6):
                return self.first
            if word in (B, B6, OTHER, OTHER6):
                return self.second
        return self.first

    @contextmanager
    def start(self, code: str, *words: object, key: str | None) -> Iterator[subprocess.Popen[str]]:
        """Run a program on the node of the first address in ``words``, until the end of the block.

        If there is a key, it runs with the library.
        """
        preload = f"LD_PRELOAD={self.library}"
        given = [] if key is None else [preload, f"STAGE_PEER_KEY={key}"]
        enter = ["nsenter", f"--net=/proc/{self.node(words)}/ns/net", "env", *given]
        line = [*enter, sys.executable, "-I", "-c", code, *map(str, words)]
        pipe = subprocess.PIPE
        with subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, code: str, *words: object, key: str | None) -> str:
        """Run a program as `start` does, and return what it printed, errors too."""
        with self.start(code, *words, key=key) as process:
            return "".join(process.communicate(timeout=120))

    @contextmanager
    def listen(
        self, address: str, how: str = "polled", *, key: str | None, port: int = 0
    ) -> Iterator[tuple[int, subprocess.Popen[str]]]:
        """Start a listener. Yield its port and its process."""
        with self.start(LISTEN, address, port, how, key=key) as listener:
            yield int(line(listener)), listener


def line(process: subprocess.Popen[str]) -> str:
    """Return the next line that the process prints."""
    assert process.stdout
    assert process.stderr
    return process.stdout.readline().rstrip("\n") or process.stderr.read()


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Build the library, and two nodes on which it is tried."""
    build = tmp_path_factory.mktemp("peers")
    subprocess.run(["make", "--silent", "-C", SOURCE, f"BUILD={build}"], check=True)
    with node(OTHER_END) as second, node(LINK.format(other=second.pid)) as first:
        for one in (first, second):
            assert one.stdin
            one.stdin.write("\n")
            one.stdin.flush()
            assert line(one) == "up"
        yield Network(first.pid, second.pid, build / "stage_peers.so")


@contextmanager
def node(commands: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process in a network of its own, which runs the commands after a line of input."""
    argv = ["unshare", "--net", "sh", "-ec", NODE.format(commands=commands)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert line(process) == "ready"
        yield process
        process.kill()


@pytest.mark.root
@pytest.mark.parametrize(
    ("source", "target", "on", "how"),
    [
        (A, B, B, "blocking"),
        (A, B, B, "timeout"),
        (A, B, B, "polled"),
        (A, B, B6, "dual"),
        (A6, B6, B6, "timeout"),
        (A6, B6, B6, "polled"),
        (A6, B6, B6, "dual"),
    ],
)
def test_ranks_connect_and_read_nothing_but_what_was_sent(
    network: Network, source: str, target: str, on: str, how: str
) -> None:
    with network.listen(on, how, key=KEY) as (port, listener):
        for connecting in ("blocking", "timeout", "polled"):
            words = (source, target, port, connecting, f"by {connecting}")
            assert network.run(CONNECT, *words, key=KEY) == ""
            assert line(listener).removeprefix("::ffff:") == f"{source} by {connecting}"


@pytest.mark.root
@pytest.mark.parametrize("how", ["blocking", "timeout", "polled"])
@pytest.mark.parametrize(("source", "target"), [(A, B), (A6, B6), (B, B), ("127.0.0.1", B)])
def test_whatever_a_stranger_sends_the_rank_accepts_ranks_only(
    network: Network, source: str, target: str, how: str
) -> None:
    rank = A6 if ":" in target else A
    with (
        network.listen(target, how, key=KEY) as (port, listener),
        network.start(STRANGER, source, target, port, key=None) as stranger,
    ):
        assert line(stranger) == "63"
        # Fifty more are silent, and stay.
        assert network.run(CONNECT, rank, target, port, "timeout", "a rank", key=KEY) == ""
        assert line(listener) == f"{rank} a rank"


@pytest.mark.root
@pytest.mark.parametrize("key", [OTHER_KEY, None, "", KEY[1:], KEY + "0", "g" + KEY[1:]])
def test_a_rank_of_another_stage_or_without_a_key_is_refused(
    network: Network, key: str | None
) -> None:
    with network.listen(B, key=KEY) as (port, listener):
        # As long as a tag: nothing else is wrong with it.
        assert network.run(CONNECT, A, B, port, "timeout", "sixteen letters.", key=key) == ""
        assert network.run(CONNECT, A, B, port, "timeout", "a rank", key=KEY) == ""
        assert line(listener) == f"{A} a rank"


@pytest.mark.root
@pytest.mark.parametrize("key", [None, "", KEY[1:], KEY + "0", KEY.upper(), "g" + KEY[1:]])
def test_without_a_key_the_library_does_nothing(network: Network, key: str | None) -> None:
    with network.listen(B, key=key) as (port, listener):
        assert network.run(CONNECT, A, B, port, "timeout", "plain", key=key) == ""
        assert line(listener) == f"{A} plain"


@pytest.mark.root
def test_a_relayed_connection_is_refused(network: Network) -> None:
    """The relay has the address of the rank, and passes on its tag."""
    with (
        network.listen(B, key=KEY) as (port, listener),
        network.start(MOVE + RELAY, B, A, B, port, network.first, key=None) as relay,
    ):
        assert network.run(CONNECT, A, B, line(relay), "timeout", "relayed", key=KEY) == ""
        assert line(relay) == "closed"
        assert network.run(CONNECT, A, B, port, "timeout", "a rank", key=KEY) == ""
        assert line(listener) == f"{A} a rank"


@pytest.mark.root
@pytest.mark.parametrize("how", ["blocking", "timeout", "polled"])
@pytest.mark.parametrize(
    ("source", "target"), [(B, B), (B6, B6), (B, OTHER), (OTHER, B), (B6, OTHER6), (OTHER6, B6)]
)
def test_a_listener_at_an_address_of_the_same_node_is_no_rank(
    network: Network, source: str, target: str, how: str
) -> None:
    """Another node's bridge may have the same address: here, anybody may listen there."""
    with network.listen(target, how, key=None) as (port, listener):
        error = network.run(CONNECT, source, target, port, how, "secret", key=KEY)
        assert error == "ECONNREFUSED\n"
        assert line(listener) == f"{source} "


@pytest.mark.root
@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        ("127.0.0.1", "127.0.0.1", 0),
        ("::1", "::1", 0),
        (A, "127.0.0.1", 0),
        (A, B, 389),
        (A6, B6, 53),
    ],
)
def test_a_local_or_privileged_service_is_sent_no_tag(
    network: Network, source: str, target: str, port: int
) -> None:
    for how in ("blocking", "timeout", "polled"):
        with network.listen(target, "blocking", key=None, port=port) as (port_there, listener):
            words = (source, target, port_there, how, "plain")
            assert network.run(CONNECT, *words, key=KEY) == ""
            assert line(listener) == f"{source} plain"


@pytest.mark.root
def test_a_web_server_is_sent_no_tag_and_the_next_rank_is(network: Network) -> None:
    code = "from stager.base.linux import untagged\nwith untagged():\n" + indent(CONNECT, " ")
    with network.listen(B, "blocking", key=None) as (port, listener):
        assert network.run(code, A, B, port, "timeout", "plain", key=KEY) == ""
        assert line(listener) == f"{A} plain"
    with network.listen(B, "blocking", key=KEY) as (port, listener):
        assert network.run(code + CONNECT, A, B, port, "timeout", "plain", key=KEY) == ""
        assert line(listener) == f"{A} plain"


@pytest.mark.root
def test_what_the_library_of_stores_connects_to_is_sent_no_tag(network: Network) -> None:
    code = """
import sys
from obstore.store import HTTPStore
try:
    HTTPStore.from_url(sys.argv[1], client_options={"allow_http": True},
                       retry_config={"max_retries": 0}).head("x")
except Exception:
    pass
"""
    with network.listen(B, "blocking", key=None) as (port, listener):
        assert network.run(code, f"http://{B}:{port}", key=KEY) == ""
        assert line(listener).startswith(f"{A} HEAD /x HTTP/1.1")


@pytest.mark.root
def test_sockets_of_other_kinds_are_left_alone(network: Network) -> None:
    code = f"""
import socket
kinds = [(socket.AF_INET, "{A}"), (socket.AF_INET6, "{A6}")]
for family, address in kinds:
    receiver, sender = (socket.socket(family, socket.SOCK_DGRAM) for _ in range(2))
    receiver.bind((address, 0))
    sender.connect(receiver.getsockname())
    sender.send(b"a datagram")
    print(receiver.recv(100))
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0stage")
listener.listen()
sender = socket.socket(socket.AF_UNIX)
sender.connect("\\0stage")
sender.send(b"a stream")
print(listener.accept()[0].recv(100))
"""
    assert network.run(code, key=KEY) == "b'a datagram'\nb'a datagram'\nb'a stream'\n"


@pytest.mark.root
@pytest.mark.parametrize("how", ["blocking", "timeout", "polled"])
def test_a_failed_connection_is_told_as_by_libc(network: Network, how: str) -> None:
    with network.listen(B, key=KEY) as (port, _):
        pass
    for source, target in ((A, B), (A6, B6)):
        error = network.run(CONNECT, source, target, port, how, "", key=KEY)
        assert error == "ECONNREFUSED\n"


@pytest.mark.root
def test_the_caller_sees_the_address_of_the_rank_and_the_errors_of_the_kernel(
    network: Network,
) -> None:
    """A short buffer for the address is as short for the rank as for strangers before it."""
    code = f"""
import errno, socket
libc = ctypes.CDLL(None, use_errno=True)
listener = socket.create_server(("", 0))
port = listener.getsockname()[1]
strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
for stranger in strangers:
    stranger.send(b"x" * 16)
move({network.first})
rank = socket.create_connection(("{B}", port), 60, ("{A}", 0))
address, length = ctypes.create_string_buffer(b"." * 16, 16), ctypes.c_uint32(8)
accepted = libc.accept(listener.fileno(), address, ctypes.byref(length))
print(accepted > 0, length.value, address.raw[4:8] == socket.inet_aton("{A}"), address.raw[8:])
listener.setblocking(False)
print(libc.accept(listener.fileno(), None, None), errno.errorcode[ctypes.get_errno()])
print(libc.accept(99, None, None), errno.errorcode[ctypes.get_errno()])
print(libc.connect(99, address, 16), errno.errorcode[ctypes.get_errno()])
print(libc.listen(99, 1), errno.errorcode[ctypes.get_errno()])
"""
    assert network.run(MOVE + code, B, key=KEY) == (
        "True 16 True b'........'\n-1 EAGAIN\n-1 EBADF\n-1 EBADF\n-1 EBADF\n"
    )
