"""A Python of its own on shared storage, as uv, pyenv or a site's modules install it."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

#: What the tests need nothing of; it would take most of the time of a copy.
_LEFT_OUT = ("__pycache__", "site-packages", "dist-packages", "test", "config-*", "idlelib")


def install_python(folder: Path, path: str) -> str:
    """Install the Python of the tests into ``folder``, which users see at ``path``.

    Return the path of its interpreter there. If it has its library in a file of its own, it looks
    for that beneath ``path``, as if it had been built for it.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base, libraries = Path(sys.base_prefix), sysconfig.get_config_var("LIBDIR")
    shutil.copytree(
        sysconfig.get_path("stdlib"), folder / "lib" / name, symlinks=True,
        ignore=shutil.ignore_patterns(*_LEFT_OUT),
    )  # fmt: skip
    (folder / "bin").mkdir()
    data = (base / "bin" / name).read_bytes()
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        for library in Path(libraries).glob(f"lib{name}.so*"):
            shutil.copy(library, folder / "lib", follow_symlinks=False)
        was, now = os.fsencode(libraries) + b"\0", os.fsencode(f"{path}/lib") + b"\0"
        assert len(now) <= len(was), f"{path}/lib is longer than {libraries}"
        data = data.replace(was, now.ljust(len(was), b"\0"))
    program = folder / "bin" / name
    program.write_bytes(data)
    program.chmod(0o755)
    (folder / "bin/python3").symlink_to(name)
    return f"{path}/bin/{name}"
