"""Which nodes are asked in which way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stager.launch.nodes import Answer

if TYPE_CHECKING:
    from tests.support.nodes import Site


def test_a_node_that_is_down_is_not_asked(site: Site) -> None:
    site.program("sinfo", "echo 'n1|idle'; echo 'n2|down*'; echo 'n3|drained'")
    site.program("srun", f"cat {site.answer('n1', {})} {site.answer('n3', {})}")
    assert site.ask("n1 n2 n3") == [
        Answer("n1", {}, state="idle"),
        Answer("n2", None, "down", "down*"),
        Answer("n3", {}, state="drained"),
    ]


def test_no_step_is_started_where_all_nodes_are_down(site: Site) -> None:
    site.program("sinfo", "echo 'n1|down'")
    assert site.ask("n1") == [Answer("n1", None, "down", "down")]


def test_nodes_inside_and_outside_of_the_job_are_asked_at_once(shell: Site) -> None:
    shell.program("srun", f"sed 's/^/0: /' {shell.answer('n1', {'by': 'srun'})}")
    shell.answer("x1", {"by": "ssh"})
    answers = shell.ask("x1 n1")
    assert answers == [Answer("x1", {"by": "ssh"}), Answer("n1", {"by": "srun"})]
