"""Root's note on each node about the filesystem of a job's own disks: how it stands there.

Root's programs import this module, so the standard library is enough for it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from stager.base.paths import SHARED_NOTES

if TYPE_CHECKING:
    from typing import NoReturn

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STARTING, READY, FAILED = "starting", "ready", "failed: "


@dataclass(frozen=True, slots=True)
class SharedNote:
    """How the filesystem of a job stands on a node, and the variables that its driver gets.

    ``state`` is `STARTING`, `READY`, or `FAILED` and the last line of what the driver said. To stop
    it takes the ``driver``, as whom it runs, and its ``keeper`` (see `stager.node.shared_fs`).
    """

    state: str
    environment: dict[str, str]
    driver: str = ""
    uid: int = 0
    keeper: str = ""

    @classmethod
    def read(cls, job: int, folder: str = SHARED_NOTES) -> SharedNote | None:
        """Return a job's note on this node, None if there is none. Raise OSError."""
        with suppress(FileNotFoundError), open(f"{folder}/{job}", encoding="utf-8") as file:
            return cls(**json.load(file))
        return None

    def to_json(self) -> str:
        """Return the content of the note's file."""
        return json.dumps(asdict(self))

    def become_driver(self, action: str) -> NoReturn:
        """Go on as the site's driver, with its own variables alone. Raise OSError."""
        variables = {"PATH": _PATH, **self.environment}
        os.execve(self.driver, [self.driver, action], variables)  # noqa: S606

    @property
    def problem(self) -> str:
        """Why the filesystem cannot be used on this node, empty if it can."""
        if self.state.startswith(FAILED):
            return self.state.removeprefix(FAILED)
        return "" if self.state == READY else "its driver did not end in time"
