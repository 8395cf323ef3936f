"""What is a finding of `stagectl doctor`, and what do its rules look at?"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from stager.node.facts import MOUNTED, UNSEEN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stager.node.facts import NodeFacts, Place, SiteFacts
    from stager.request.policy import Policy


class Verdict(StrEnum):
    """What a finding means, the worst first."""

    PROBLEM = "problem"
    UNKNOWN = "unknown"
    #: Not wrong, but the site should have weighed it.
    NOTE = "note"
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """What was found about one ``subject``, and the ``remedy`` unless it is well."""

    subject: str
    verdict: Verdict
    text: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """What is printed of it."""
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


@dataclass(frozen=True)
class Examined:
    """What the rules look at: the site, the site's stage.toml, and the facts of each node."""

    site: SiteFacts
    policy: Policy
    nodes: Mapping[str, NodeFacts]

    @property
    def computing(self) -> dict[str, NodeFacts]:
        """The nodes that run jobs."""
        return {name: node for name, node in self.nodes.items() if node.computes}


def ok(subject: str, text: str) -> Finding:
    """Return that all is well."""
    return Finding(subject, Verdict.OK, text)


def problem(subject: str, text: str, remedy: str) -> Finding:
    """Return what is wrong."""
    return Finding(subject, Verdict.PROBLEM, text, remedy)


def note(subject: str, text: str, remedy: str = "") -> Finding:
    """Return what the site should have weighed."""
    return Finding(subject, Verdict.NOTE, text, remedy)


def unknown(subject: str, text: str, remedy: str = "") -> Finding:
    """Return what could not be checked."""
    return Finding(subject, Verdict.UNKNOWN, text, remedy)


def seen_or_problem(subject: str, there: Place, text: str, remedy: str) -> Finding:
    """Return the problem ``text``, unless this user cannot see what is there."""
    if there.owner == UNSEEN:
        return unknown(subject, f"{there.path} cannot be seen by this user")
    if there.owner == MOUNTED:
        text = f"a user mounted a filesystem at {there.path}"
        remedy = "unmount it (umount -l)"
    return problem(subject, text, remedy)


def closed_problem(subject: str, text: str, file: str, closed: str, follows: str = "") -> Finding:
    """Return that users cannot reach a ``file``, as it or a folder above it is ``closed``."""
    why, bit = ("", "r") if file == closed else (f", as {closed} is closed to them", "x")
    return problem(subject, text + why + follows, f"chmod o+{bit} {closed}")
