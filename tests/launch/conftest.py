"""A site without Slurm, and with a stand-in for ssh."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from stager.launch import nodes
from tests.support.nodes import Site

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    monkeypatch.setitem(sys.modules, "pyslurm", None)
    monkeypatch.setattr(nodes, "PATIENCE", 0.6)
    site = Site(tmp_path)
    site.program("sinfo", "exit 1")
    return site


@pytest.fixture
def shell(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site whose clush.conf names its own ssh, which prints the file of the node's answer."""
    monkeypatch.setenv("CLUSTERSHELL_CFGDIR", str(site.folder))
    site.labels = False
    (site.folder / "clush.conf").write_text(
        f"[Main]\nfanout: 2\nssh_path: {site.folder}/our-ssh\nssh_options: -oPort=2222\n"
    )
    site.program(
        "our-ssh",
        f'echo "$@" >>{site.folder}/asked\n'
        "while [[ $1 == -* ]]; do shift; done\n"
        f'case $1 in *7) exec sleep 60;; *8) echo "ssh: no route to $1" >&2; exit 255;; esac\n'
        f"cat {site.folder}/$1.answer",
    )
    return site
