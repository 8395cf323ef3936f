"""Ask nodes by ClusterShell, which reaches them as the site's clush.conf says: by ssh."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Any

from stager.base.errors import LaunchError
from stager.base.text import printable
from stager.launch import answers
from stager.launch.answers import NODE_ARGV, Mailbox, no_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stager.copies.upkeep import Command
    from stager.launch.answers import Answer

#: Seconds between looks for nodes that are late.
_INTERVAL = 0.25
_REMEDY = "check ssh to it, and that slurm-stage is installed there"


def ask_by_clustershell(nodes: Sequence[str], command: Command) -> dict[str, Answer]:
    """Return what each of ``nodes`` answers, or why it does not.

    Raise LaunchError if clush.conf cannot be read. Must run in the main thread.
    """
    from ClusterShell.Task import task_self  # takes a while, and most commands do without

    mailbox = Mailbox(nodes)
    task = task_self()
    _apply_site_settings(task)
    handler = _make_handler(mailbox, command)
    for node in nodes:
        line = shlex.join([*NODE_ARGV, command.to_text(), node])
        handler.workers[node] = task.shell(
            line, nodes=node, handler=handler, stdin=False, stderr=True
        )
    task.timer(_INTERVAL, handler=handler, interval=_INTERVAL, autoclose=True)
    task.resume()
    for node in list(mailbox.waiting):
        mailbox.give_up(node, f"stagectl on this node ended without an answer; {_REMEDY}")
    return mailbox.answers


class _NoOptions:
    """The command line of clush without any option."""

    option = ()

    def __getattr__(self, name: str) -> None:
        return None


def _apply_site_settings(task: Any) -> None:
    """Let ClusterShell work as clush does here, by the site's clush.conf."""
    from configparser import Error

    from ClusterShell.CLI.Config import ClushConfig, ClushConfigError

    try:
        config = ClushConfig(_NoOptions())
        task.set_info("fanout", config.fanout)
        task.set_info("connect_timeout", config.connect_timeout)
        for name in ("ssh_path", "ssh_user", "ssh_options"):
            value = getattr(config, name)
            if value:
                task.set_info(name, value)
    except (ClushConfigError, Error) as error:
        raise LaunchError(f"clush.conf: {printable(str(error))}") from None


def _make_handler(mailbox: Mailbox, command: Command) -> Any:
    """Return the handler of ClusterShell's events; its class needs ClusterShell imported."""
    from ClusterShell.Event import EventHandler

    class Handler(EventHandler):  # type: ignore[misc]
        """Has one worker a node, so that one can be given up without the others."""

        def __init__(self) -> None:
            self.workers: dict[str, Any] = {}
            self._deadlines: dict[str, float] = {}
            self._last_lines: dict[str, str] = {}

        def ev_pickup(self, worker: Any, node: str) -> None:
            # Not before: with more nodes than ClusterShell's fan-out, some begin later.
            self._deadlines[node] = time.monotonic() + answers.PATIENCE

        def ev_read(self, worker: Any, node: str, sname: str, msg: bytes) -> None:
            line = msg.decode(errors="replace")
            if not mailbox.take(line, node) and line.strip():
                self._last_lines[node] = line.strip()

        def ev_hup(self, worker: Any, node: str, rc: int) -> None:
            ended = f"stagectl on this node ended with code {rc} without an answer"
            mailbox.give_up(node, self._last_lines.get(node) or f"{ended}; {_REMEDY}")

        def ev_timer(self, timer: Any) -> None:
            now = time.monotonic()
            for node in mailbox.overdue(command):
                if now >= self._deadlines.get(node, now + 1):
                    mailbox.give_up(node, no_answer())
                    self.workers[node].abort()

    return Handler()
