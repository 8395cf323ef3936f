"""What other programs may import, and what that costs those that do not use it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import stager

if TYPE_CHECKING:
    from pathlib import Path


def test_what_may_be_imported_is_there() -> None:
    assert {name for name in stager.__all__ if not hasattr(stager, name)} == set()
    with pytest.raises(AttributeError):
        stager.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_the_package_imports_nothing_by_itself() -> None:
    program = "import stager, sys; print([name for name in sys.modules if 'stager.' in name])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_program_stages_and_asks_for_what_is_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    source = tmp_path / "img.sqsh"
    source.write_bytes(b"x" * 300_000)
    config, disks = tmp_path / "stage.toml", tmp_path / "nodes"
    config.write_text('roots = ["/nvme"]\n[launch.environment]\nOMPI_MCA_btl = "self,sm"\n')
    nodes = stager.find_nodes(config, local=2, local_root=disks)
    directive = stager.Directive(str(source), "/nvme/img.sqsh")
    first, second = (stager.stage([one], nodes) for one in (directive, str(directive)))
    assert (first.code, second.code) == (0, 0)
    assert [first.items[0].received, second.items[0].received] == [["node1", "node2"], []]
    held, silent = stager.status(config, local_root=disks)
    assert silent == {}
    assert {name: [one.destination for one in node.entries] for name, node in held.items()} == {
        "node1": ["/nvme/img.sqsh"], "node2": ["/nvme/img.sqsh"],
    }  # fmt: skip
    with pytest.raises(stager.PolicyRefusal):
        stager.stage([f"{source}:/home/img.sqsh"], nodes)
