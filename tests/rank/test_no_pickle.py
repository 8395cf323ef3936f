"""No rank receives Python objects by MPI: to load one is to run what its sender wrote."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from mpi4py import MPI

import stager

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What sends or receives Python objects in mpi4py; what sends plain bytes has a capital letter.
BY_PICKLE = {
    "allgather", "allreduce", "alltoall", "bcast", "bsend", "exscan", "gather", "ibsend", "improbe",
    "irecv", "isend", "issend", "mprobe", "pickle", "recv", "reduce", "scan", "scatter", "send",
    "sendrecv", "ssend",
}  # fmt: skip
#: What has methods of these names too: our channel, the forward of chunks, and sockets.
OTHERS = {"channel", "_forward", "connection"}
#: The modules that may import MPI.
MODULES = [
    path for name in ("rank", "wire") for path in Path(stager.__file__).parent.glob(f"{name}/*.py")
]
#: Modules that fetch or run objects by themselves.
LOADERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing"}


def calls_by_pickle(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes in ``tree`` by which a communicator sends or receives objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in BY_PICKLE:
            owner = ast.unparse(node.value).rpartition(".")[2]
            if owner not in OTHERS:
                yield ast.unparse(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            yield from (name for name in names if name in LOADERS)


def test_all_methods_of_mpi4py_that_use_pickle_are_known() -> None:
    in_both = {
        name
        for name in dir(MPI.Intracomm)
        if hasattr(MPI.Intracomm, name.capitalize()) and name.islower() and name[0] != "_"
    }
    plain = {"barrier", "free", "group", "info", "iprobe", "is_inter", "is_intra", "probe", "split"}
    assert in_both - plain <= BY_PICKLE


@pytest.mark.parametrize(
    "text",
    ["comm.bcast(1)", "self._comm.allgather(x)", "f = context.comm.recv", "import pickle"],
)
def test_a_use_of_them_is_found(text: str) -> None:
    assert len(list(calls_by_pickle(ast.parse(text)))) == 1


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_module_uses_one(path: Path) -> None:
    # The channel has methods of such names itself, and replaces what pickles.
    known = ["self.allgather", "MPI.pickle"] if path.name == "channel.py" else []
    assert list(calls_by_pickle(ast.parse(path.read_text()))) == known
