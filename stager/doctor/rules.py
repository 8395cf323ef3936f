"""Apply all rules to the facts of a site and its nodes. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.doctor.node_rules import NODE_RULES
from stager.doctor.site_rules import SITE_RULES

if TYPE_CHECKING:
    from stager.doctor.finding import Examined, Finding


def examine(examined: Examined) -> dict[Finding, list[str]]:
    """Return all findings, each with the nodes that it is about; none for one about the site."""
    found: dict[Finding, list[str]] = {}
    for rule in NODE_RULES:
        for name, node in examined.nodes.items():
            for finding in rule(node, examined):
                found.setdefault(finding, []).append(name)
    for of_site in SITE_RULES:
        for finding, names in of_site(examined):
            found[finding] = names
    return found
