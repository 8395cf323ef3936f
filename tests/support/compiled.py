"""Compile parts of the C code with sanitizers, and query them over a pipe."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROLOG = Path(__file__).parents[2] / "prolog"
SERVERS = Path(__file__).parents[1] / "prolog"
FLAGS = (
    "-std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -g -O1 "
    "-fsanitize=address,undefined -fno-sanitize-recover=all"
)


@contextmanager
def compiled(part: str, folder: Path, library: str = "spank") -> Iterator[Callable[..., bool]]:
    """Compile ``part`` of a library into ``folder``, with ``tests/prolog/<part>_server.c``.

    Yield a function that sends a few texts to the program and returns its answer, yes or no.
    """
    program = folder / f"{part}_server"
    sources = [f"{SERVERS}/{part}_server.c", f"{PROLOG}/{library}/{part}.c"]
    include = f"-I{PROLOG}/{library}"
    subprocess.run(["gcc", *FLAGS.split(), include, "-o", str(program), *sources], check=True)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin
        assert server.stdout
        questions, answers = server.stdin, server.stdout

        def ask(*texts: str) -> bool:
            questions.write("".join(f"{text}\0" for text in texts).encode())
            questions.flush()
            return {b"0": False, b"1": True}[answers.read(1)]

        yield ask
        questions.close()
        assert server.wait() == 0
