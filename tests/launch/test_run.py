"""How ranks are run: their events, their Outcome, and what is reported without one."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stager.base.errors import Failure, LaunchError
from stager.base.events import event
from stager.base.outcome import Evicted, ItemReport, Outcome
from stager.base.telemetry import Kind
from stager.launch import run as run_module
from stager.launch.health import Pulses
from stager.launch.run import LOST as LOST_RANK
from stager.launch.run import EndedError, Patience, run, with_evictions
from tests.support.users import within

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The remedy that every failure to begin ends with.
REMEDY = (
    "try again, and if it fails again tell the administrator (mpi in the [launch] section of "
    "stage.toml may not fit this MPI library; srun --mpi=list names Slurm's plugins, Open MPI "
    "needs pmix)"
)
#: What ends a start in which no rank has begun, and one in which all have.
NONE_REMEDY = (
    "submit again, and if it fails again tell the administrator (slurmd's log on the nodes says "
    "whether it started the step; stagectl doctor, whether the Python is there)"
)
NONE = (
    "MPI did not start within 0.3 s: {} has started no staging process on any node, or none that "
    f"can read its Python; {NONE_REMEDY}"
)
WAITING = (
    "MPI did not start within 0.3 s: the staging processes run on all nodes, but wait for each "
    "other in MPI_Init: the network between the nodes, or MPI's settings, may be at fault; "
)
DONE = Outcome(
    items=[
        ItemReport(
            source="/shared/img.sqsh", destination="/nvme/img.sqsh", size=5,
            received=["n1", "n2"], current=[], senders=[], digest="00", source_bytes_read=5,
            peak_memory=0,
            seconds=0.5, reasons=["absent"],
        )
    ],
    failures=[],
    seconds=0.75,
    phases={"MPI init": 0.5, "survey": 0.25},
)  # fmt: skip
REFUSED = Outcome(
    [], [Failure(5, "/nvme: 1 bytes are needed", "n2")], 0.25, phases={"survey": 0.25}
)
STARTED: dict[str, Any] = {"event": "started", "nodes": 4}


def result(outcome: Outcome) -> str:
    return event("result", outcome=outcome.to_json())


def without_launch(outcome: Outcome) -> Outcome:
    """Return the outcome without the launcher's time, which must fill its total."""
    assert sum(outcome.phases.values()) == pytest.approx(outcome.seconds)
    phases = dict(outcome.phases)
    assert next(iter(phases)) == "launch"
    assert phases.pop("launch") >= 0
    assert phases.pop("end") > 0
    return replace(outcome, phases=phases, seconds=sum(phases.values()))


class Launcher:
    """Runs a shell script as the launcher, with the lines that it prints in variables."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.limit = 0.0
        self.patience = Patience()

    def run(self, script: str, start_timeout: float = 10, **lines: str) -> Outcome:
        environment = {"PATH": os.defpath, "STARTED": json.dumps(STARTED), **lines}
        argv = ["/bin/sh", "-c", script]
        pulses = Pulses(lambda: ["n1", "n2"], "n1", self.limit)
        show = self.events.append
        return without_launch(
            run(argv, environment, start_timeout, show, pulses, patience=self.patience)
        )

    def failure(self, script: str, start_timeout: float = 10, **lines: str) -> str:
        with pytest.raises(LaunchError) as caught:
            self.run(script, start_timeout, **lines)
        assert caught.value.code == 8
        return str(caught.value)


@pytest.fixture
def launcher() -> Launcher:
    return Launcher()


def say(*names: str) -> str:
    """Return a script that prints the named variables, each as a line."""
    return "; ".join(f"printf '%s\\n' \"${name}\"" for name in names)


@pytest.mark.parametrize("outcome", [DONE, REFUSED], ids=["done", "refused"])
def test_the_outcome_that_the_ranks_agreed_on_is_returned(
    launcher: Launcher, outcome: Outcome
) -> None:
    assert launcher.run(say("STARTED", "RESULT"), RESULT=result(outcome)) == outcome


def test_events_are_passed_on_in_order_but_not_the_result(launcher: Launcher) -> None:
    waiting = {"event": "waiting", "node": "n1", "holder": "job 16", "seconds": 0}
    progress = {"event": "progress", "destination": "/b", "sent": 1, "size": 2, "seconds": 1.5}
    launcher.run(
        say("STARTED", "WAITING", "PROGRESS", "RESULT"),
        WAITING=json.dumps(waiting), PROGRESS=json.dumps(progress), RESULT=result(DONE),
    )  # fmt: skip
    assert launcher.events == [STARTED, waiting, {**progress, "quiet": []}]


@pytest.mark.parametrize("progress", [False, True], ids=["nothing", "progress"])
def test_what_the_ranks_do_is_told_if_nothing_else_is(launcher: Launcher, progress: bool) -> None:
    launcher.limit = 60
    pulse = {"event": "pulse", "count": 1, "pace": [0, 0, 0]}
    waits = {**pulse, "node": "n1", "activity": Kind.WAIT, "doing": "waiting for other nodes"}
    writes = {**pulse, "node": "n2", "activity": Kind.WRITE, "doing": "writing /nvme/a"}
    moved = {"event": "progress", "destination": "/nvme/a", "sent": 1, "size": 2, "seconds": 1.5}
    more = say("MOVED") if progress else ":"
    launcher.run(
        f"{say('STARTED')}; sleep 2.7; {say('WAITS', 'WRITES')}; {more}; sleep 3; {say('RESULT')}",
        WAITS=json.dumps(waits), WRITES=json.dumps(writes), MOVED=json.dumps(moved),
        RESULT=result(DONE),
    )  # fmt: skip
    _, told = launcher.events
    if progress:
        assert told == {**moved, "quiet": []}
        return
    assert 3 < told.pop("seconds") < 60
    assert told == {"event": "working", "text": "n2 is writing /nvme/a"}


def test_an_outcome_counts_whatever_code_the_launcher_ends_with(launcher: Launcher) -> None:
    assert launcher.run(say("STARTED", "RESULT") + "; exit 3", RESULT=result(DONE)) == DONE


GONE = Evicted("n2", "/nvme/old", 4096)
EVICTED = event("evicted", node=GONE.node, destination=GONE.destination, size=GONE.size)


def test_copies_that_ranks_remove_are_part_of_the_outcome(launcher: Launcher) -> None:
    outcome = launcher.run(
        say("STARTED", "EVICTED", "RESULT"), EVICTED=EVICTED, RESULT=result(DONE)
    )
    assert outcome == replace(DONE, evicted=[GONE])


def test_copies_that_ranks_removed_are_known_though_the_ranks_end(launcher: Launcher) -> None:
    with pytest.raises(EndedError) as caught:
        launcher.run(say("STARTED", "EVICTED"), EVICTED=EVICTED)
    assert caught.value.evicted == (GONE,)
    outcome = with_evictions(partial(launcher.run, say("STARTED", "EVICTED"), EVICTED=EVICTED))
    assert (outcome.evicted, outcome.failures) == ([GONE], [Failure(8, str(caught.value), "")])


def test_ranks_that_end_and_removed_nothing_raise(launcher: Launcher) -> None:
    with pytest.raises(EndedError):
        with_evictions(partial(launcher.run, say("STARTED")))


@pytest.mark.parametrize("size", ['"4096"', "null"])
def test_a_removal_that_cannot_be_read_ends_the_stage(launcher: Launcher, size: str) -> None:
    launcher.patience = Patience(crash=0.2)
    lie = EVICTED.replace("4096", size)
    assert run_module._UNREADABLE in launcher.failure(
        say("STARTED", "EVICTED") + "; sleep 9", EVICTED=lie
    )


def test_noise_beside_the_events_does_no_harm(launcher: Launcher) -> None:
    script = f"echo noise; echo noise >&2; {say('STARTED')}; echo; {say('RESULT')}; echo noise"
    assert launcher.run(script, RESULT=result(DONE)) == DONE
    assert launcher.events == [STARTED]


def test_what_other_ranks_print_may_come_between_the_parts_of_a_long_event(
    launcher: Launcher,
) -> None:
    """As Slurm, which passes on at most 1024 bytes of a task's output at a time, has it."""
    many = replace(DONE, failures=[Failure(4, "its disk is full", f"n{n}") for n in range(99)])
    pulse = event("pulse", node="n1", count=1, activity=5, doing="", pace=[0, 0.0, 0.0])
    parts = result(many).split("\n")
    assert len(parts) > 5
    mixed = "; ".join(f"echo '{part}'; {say('PULSE')}" for part in parts)
    assert launcher.run(f"{say('STARTED')}; {mixed}", PULSE=pulse) == many


def test_how_an_event_begins_that_was_cut_off_is_told(launcher: Launcher) -> None:
    parts = event("crashed", node="n2", error="out of luck " * 200).split("\n")
    said = launcher.failure(f"{say('STARTED', 'PART')}; exit 1", PART=parts[0])
    assert said.startswith("staging ended early: sh ended with code 1; submit again\n")
    assert '{"event": "crashed", "node": "n2", "error": "out of luck out of luck ' in said


def test_an_event_may_come_in_pieces(launcher: Launcher) -> None:
    script = f"""printf '{{"eve'; sleep 0.05; printf 'nt": "started", '; echo noise >&2
        sleep 0.05; printf '"nodes": 4}}\n{{"event": "waiting"}}\n'; {say("RESULT")}"""
    assert launcher.run(script, RESULT=result(DONE)) == DONE
    assert launcher.events == [STARTED, {"event": "waiting"}]


def test_a_last_event_needs_no_newline(launcher: Launcher) -> None:
    script = f"{say('STARTED')}; printf '%s' \"$RESULT\""
    assert launcher.run(script, RESULT=result(DONE)) == DONE


def test_an_event_of_many_nodes_is_longer_than_a_pipe_holds(
    launcher: Launcher, tmp_path: Path
) -> None:
    names = [f"node{number:06}" for number in range(20_000)]
    outcome = Outcome(
        [], [Failure(5, "/nvme: no room", name) for name in names], 1.0, phases={"survey": 1.0}
    )
    (tmp_path / "result").write_text(result(outcome) + "\n")
    assert launcher.run(f"{say('STARTED')}; cat {tmp_path}/result") == outcome


def test_the_time_before_and_after_the_ranks_is_the_launchers() -> None:
    """The launcher ends 1 s after the line of the ranks, which may be read late."""
    ranks = Outcome([], [], 0.05, phases={"survey": 0.03125, "end": 0.01875})
    script = 'sleep 0.2; printf "%s\\n" "$RESULT"; sleep 1'
    begun = time.monotonic()
    outcome = run(["/bin/sh", "-c", script], {"RESULT": result(ranks)}, 10, lambda _: None)
    whole = time.monotonic() - begun
    assert list(outcome.phases) == ["launch", "survey", "end"]
    assert outcome.phases["launch"] >= 0.15
    assert outcome.phases["survey"] == 0.03125
    assert outcome.phases["end"] >= 0.1 + 0.01875
    assert 0.3 <= outcome.seconds <= whole
    assert outcome.seconds == sum(outcome.phases.values())


def test_ranks_that_report_more_time_than_there_was_leave_none_to_the_launcher() -> None:
    """Clocks of other processes may differ by a little."""
    ranks = Outcome([], [], 60.0, phases={"survey": 60.0})
    outcome = run(["/bin/echo", result(ranks)], {}, 10, lambda _: None)
    assert outcome.phases == {"launch": 0.0, "survey": 60.0, "end": outcome.phases["end"]}
    assert 0 < outcome.phases["end"] == pytest.approx(outcome.seconds - 60)


def test_the_launcher_has_the_given_environment_and_nothing_to_read() -> None:
    with pytest.raises(LaunchError) as caught:
        run(["/usr/bin/env"], {"B": "2", "A": "1"}, 10, lambda _: None)
    assert str(caught.value) == f"MPI did not start: env ended with code 0; {REMEDY}\n  B=2\n  A=1"
    with pytest.raises(LaunchError) as caught:
        run(["/bin/cat"], {}, 10, lambda _: None)
    assert str(caught.value) == f"MPI did not start: cat ended with code 0; {REMEDY}"


def test_a_launcher_that_is_not_there_is_named() -> None:
    with pytest.raises(LaunchError) as caught:
        run(["/nowhere/srun", "-n", "4"], {}, 10, lambda _: None)
    assert str(caught.value) == "/nowhere/srun cannot be started: No such file or directory"


def test_a_launcher_that_is_not_a_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("not executable")
    with pytest.raises(LaunchError) as caught:
        run([f"{tmp_path}/srun"], {}, 10, lambda _: None)
    assert str(caught.value) == f"{tmp_path}/srun cannot be started: Permission denied"


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"LIST": "x" * (1 << 20)}, "Argument list too long"),
        ({"A=B": "x"}, "illegal environment variable name"),
        ({"A": "\0"}, "embedded null byte"),
    ],
    ids=["too long", "a name with =", "a null byte"],
)
def test_an_environment_that_no_program_can_have_is_a_launch_error(
    environment: Mapping[str, str], problem: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        run(["/bin/true"], environment, 10, lambda _: None)
    assert str(caught.value) == f"/bin/true cannot be started: {problem}"


NOT_STARTED, CUT_OFF = "MPI did not start", "staging ended early"


#: Scripts that end without a result, and the whole message about each.
ENDS: dict[str, tuple[str, str]] = {
    "at once": ("exit 3", f"{NOT_STARTED}: sh ended with code 3; {REMEDY}"),
    "at once, as if all was well": ("exit 0", f"{NOT_STARTED}: sh ended with code 0; {REMEDY}"),
    "at once, by a signal": (
        "kill -KILL $$", f"{NOT_STARTED}: sh was ended by signal 9; {REMEDY}",
    ),
    "once begun": (
        f"{say('STARTED')}; exit 1", f"{CUT_OFF}: sh ended with code 1; submit again",
    ),
    "once begun, as if all was well": (
        say("STARTED"), f"{CUT_OFF}: sh ended with code 0; submit again",
    ),
    "once begun, by a signal": (
        f"{say('STARTED')}; kill -TERM $$", f"{CUT_OFF}: sh was ended by signal 15; submit again",
    ),
    "in the middle of its result": (
        f"""{say("STARTED")}; printf '{{"event": "result", "outc'""",
        f'{CUT_OFF}: sh ended with code 0; submit again\n  {{"event": "result", "outc',
    ),
}  # fmt: skip


@pytest.mark.parametrize(("script", "message"), ENDS.values(), ids=ENDS)
def test_ranks_that_end_without_a_result_are_explained(
    launcher: Launcher, script: str, message: str
) -> None:
    assert launcher.failure(script) == message


ENDED = f"{NOT_STARTED}: sh ended with code 1; {REMEDY}"
#: What a launcher says before it ends with code 1, and the lines of it that are repeated.
NOISE: dict[str, tuple[str, list[str]]] = {
    "on stderr": ("echo one >&2; echo two >&2", ["one", "two"]),
    "on stdout": ("echo one; echo two", ["one", "two"]),
    "12 lines": ("seq 12", [str(number) for number in range(1, 13)]),
    "more than 12 lines": ("seq 100", [str(number) for number in range(89, 101)]),
    "blank lines": ("echo one; echo; echo '  '; echo two", ["one", "two"]),
    "blanks at the ends": ("printf '  one \\t\\r\\n'", ["  one"]),
    "a line that is not ended": ("printf 'one\\ntw'; printf o", ["one", "two"]),
    "bytes that are no text": ("printf 'caf\\351\\n'", ["caf\N{REPLACEMENT CHARACTER}"]),
    "what is nearly an event": ("""echo '{"event": started}'""", ['{"event": started}']),
    "JSON that is no event": ("""echo '{"result": 1}'""", ['{"result": 1}']),
    "a very long line": ("printf %0300000d 7; echo; echo end", ["0" * 299_999 + "7", "end"]),
}  # fmt: skip


@pytest.mark.parametrize(("script", "lines"), NOISE.values(), ids=NOISE)
def test_the_launchers_last_lines_are_repeated(
    launcher: Launcher, script: str, lines: list[str]
) -> None:
    assert launcher.failure(f"{script}; exit 1") == "\n  ".join([ENDED, *lines])


def test_the_last_lines_of_both_streams_are_repeated(launcher: Launcher) -> None:
    ended, *lines = launcher.failure("echo one; echo two >&2; exit 1").split("\n  ")
    assert (ended, sorted(lines)) == (ENDED, ["one", "two"])


def _is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_rank_that_crashed_is_named_above_the_lines_of_mpi(
    launcher: Launcher,
) -> None:
    lines = [event("crashed", node=node, error="KeyError: 'size'") for node in ("n3", "n1")]
    script = f"{say('STARTED', 'FIRST', 'SECOND')}; echo MPI_ABORT was invoked >&2; exit 1"
    assert launcher.failure(script, FIRST=lines[0], SECOND=lines[1]) == (
        f"{CUT_OFF}: n3: KeyError: 'size'; submit again\n  MPI_ABORT was invoked"
    )


def blamed(launcher: Launcher, script: str, start_timeout: float = 10, **lines: str) -> list[Any]:
    """The nodes that are blamed for an end without an Outcome, and what for."""
    with pytest.raises(EndedError) as caught:
        launcher.run(script, start_timeout, **lines)
    assert all(one.code == 8 for one in caught.value.blamed)
    return [(one.node, one.message) for one in caught.value.blamed]


def loss(node: str, by: str) -> str:
    return event("crashed", node=node, error=LOST_RANK, by=by)


def test_of_lost_ranks_the_first_is_blamed_and_none_that_ended_because_of_it(
    launcher: Launcher,
) -> None:
    launcher.patience = Patience(crash=0.2)
    lines = {"A": loss("n1", by="n4"), "B": loss("n2", by="n1"), "C": loss("n3", by="n2")}
    assert blamed(launcher, say("STARTED", *lines), 10, **lines) == [("n3", LOST_RANK)]
    message = launcher.failure(say("STARTED", *lines), 10, **lines)
    assert message == f"{CUT_OFF}: n3: {LOST_RANK}; submit again"


def test_a_rank_that_fails_by_itself_is_blamed(launcher: Launcher) -> None:
    crashed = event("crashed", node="n2", error="MemoryError: ")
    said = say("STARTED", "CRASHED")
    assert blamed(launcher, said, CRASHED=crashed) == [("n2", "MemoryError: ")]


def test_a_node_that_slurm_finds_failed_is_blamed_before_what_ranks_say(
    launcher: Launcher,
) -> None:
    lines = {
        "CRASHED": event("crashed", node="n1", error="lost", by=""),
        "LINE": "srun: error: Node failure on n2",
    }
    assert blamed(launcher, say("STARTED", *lines), 10, **lines) == [("n2", LOST_RANK)]


def test_a_rank_that_fails_because_of_what_it_received_is_not_blamed(launcher: Launcher) -> None:
    crashed = event("crashed", node="n2", error="MPI received what no rank sent", by="n2")
    assert blamed(launcher, say("STARTED", "CRASHED"), CRASHED=crashed) == []


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: n2: task 1: Killed",
        "srun: error: Node failure on n2",
        "srun: error: Task launch for StepId=7.0 failed on node n2: Communication failure",
        (
            "slurmstepd: error:  mpi/pmix_v4: _errhandler: n2 [1]: pmixp_client_v2.c:211: Error "
            "handler invoked: status = -61, source = [slurm.pmix.7.0:1]"
        ),
    ],
)
def test_the_first_node_of_which_slurm_complains_is_blamed(launcher: Launcher, line: str) -> None:
    later = "srun: error: n1: task 0: Killed"
    said = say("STARTED", "LINE", "LATER")
    assert blamed(launcher, said, LINE=line, LATER=later) == [("n2", LOST_RANK)]


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: n[1-2]: tasks 0-1: Killed",
        "srun: error: n9: task 1: Killed",
        "srun: error: n2: task 1: Exited with exit code 1",
        "srun: error: n2: task 1: Exited with exit code 8",
        "srun: error: Unable to create step for job 7: Job/step already completing",
    ],
)
def test_other_complaints_blame_no_node(launcher: Launcher, line: str) -> None:
    assert blamed(launcher, say("STARTED", "LINE"), LINE=line) == []


def test_a_node_that_does_not_answer_is_blamed(launcher: Launcher) -> None:
    launcher.limit = 2
    pulse = event("pulse", node="n1", count=1, activity=5, doing="", pace=[0, 0.0, 0.0])
    script = f"{say('STARTED')}; while sleep 0.1; do {say('PULSE')}; done"
    silent = (
        "no answer for 2 s: the node or its network has failed, or the staging process there is "
        "stopped"
    )
    assert blamed(launcher, script, PULSE=pulse) == [("n2", silent)]


def test_a_node_whose_rank_does_not_begin_is_blamed_if_others_do(launcher: Launcher) -> None:
    alive = event("alive", node="n1")
    late = "the staging process there did not begin within 0.5 s"
    assert blamed(launcher, f"{say('ALIVE')}; exec sleep 60", 0.5, ALIVE=alive) == [("n2", late)]
    assert blamed(launcher, "exec sleep 60", 0.5) == []


def test_ranks_that_do_not_begin_in_time_are_ended(launcher: Launcher) -> None:
    message, _, pid = launcher.failure("echo $$; exec sleep 60", 0.3).partition("\n  ")
    assert message == NONE.format("sh")
    assert _is_gone(int(pid))


ALIVE = """echo '{"event": "alive", "node": "%s"}'; """


def test_nodes_whose_rank_has_not_begun_are_named(launcher: Launcher) -> None:
    assert launcher.failure(f"{ALIVE % 'n2'} exec sleep 60", 0.3) == (
        "MPI did not start within 0.3 s: the staging process on n1 has not begun; the node or its "
        "network has failed, or the process is stopped or cannot read its Python; submit again; if "
        "it fails again, use other nodes (--exclude) and tell the administrator"
    )


@pytest.mark.parametrize("nodes", [["n1", "n2"], ["n2", "n7"]], ids=",".join)
def test_no_node_is_named_if_all_have_begun(launcher: Launcher, nodes: list[str]) -> None:
    alive = "".join(ALIVE % node for node in nodes)
    assert launcher.failure(f"{alive} exec sleep 60", 0.3) == WAITING + REMEDY


def test_no_node_is_named_if_nodes_have_other_names(launcher: Launcher) -> None:
    message = launcher.failure(f"{ALIVE % 'n7'} exec sleep 60", 0.3)
    assert message == f"MPI did not start within 0.3 s; {REMEDY}"


def test_if_mpiexec_has_started_no_rank_its_own_remedy_is_told() -> None:
    with pytest.raises(LaunchError) as caught:
        run(["/bin/sleep", "60"], {}, 0.3, lambda _: None, remedy="try ssh")
    assert str(caught.value) == NONE.format("sleep").replace(NONE_REMEDY, "try ssh")


def test_noise_is_not_a_sign_of_ranks_that_begin(launcher: Launcher) -> None:
    script = "while echo waiting for resources >&2; do sleep 0.02; done"
    message, *lines = launcher.failure(script, 0.3).split("\n  ")
    assert message == NONE.format("sh")
    assert set(lines) == {"waiting for resources"}


def test_noise_without_a_pause_does_not_put_off_the_end() -> None:
    def act() -> str:
        with pytest.raises(LaunchError) as caught:
            run(["/usr/bin/yes"], {}, 0.3, lambda _: None)
        return str(caught.value)

    lines = "\n  y" * 12
    assert within(2, act) == f"{NONE.format('yes')}{lines}"


def test_ranks_that_began_take_the_time_they_need(launcher: Launcher) -> None:
    script = f"{say('STARTED')}; sleep 0.5; {say('RESULT')}"
    assert launcher.run(script, 0.3, RESULT=result(DONE)) == DONE


#: The pulses of two nodes, of which the first stands still.
PULSES = """printf '{"event": "pulse", "node": "%s", "count": 7, "activity": 0, \
"doing": "reading /s", "pace": [0, 0, 0]}\\n'"""
#: One of them writes 40 MB/s, the other 800, which has cost more than 5 s.
SLOW = """printf '{"event": "pulse", "node": "%s", "count": 7, "activity": 1, \
"doing": "writing /s", "pace": [400000000, %s, %s]}\\n'"""


def test_ranks_that_stand_still_are_ended_and_the_node_is_named(launcher: Launcher) -> None:
    launcher.limit = 1
    script = f"echo $$; {say('STARTED')}; while {PULSES} n1 n2; do sleep 0.1; done"
    message = launcher.failure(script)
    assert message == (
        f"{CUT_OFF}: n[1-2]: no progress for 1 s while reading /s; submit again; if it fails "
        "again, use other nodes (--exclude) and tell the administrator"
    )
    assert launcher.events == [STARTED]


def test_a_slow_node_is_told_while_the_stage_lasts(launcher: Launcher) -> None:
    pulses = f"{SLOW} n1 0.5 0 n2 10 10 n2 11 11"
    assert launcher.run(f"{say('STARTED')}; {pulses}; {say('RESULT')}", RESULT=result(DONE)) == DONE
    text = "n2 is slow: it writes 40 MB/s, the others 800 MB/s"
    assert launcher.events == [STARTED, {"event": "slow", "text": text}]


def test_a_rank_that_is_silent_is_named(launcher: Launcher) -> None:
    launcher.limit = 1
    message = launcher.failure(f"{say('STARTED')}; while {PULSES} n1; do sleep 0.1; done")
    assert message == (
        f"{CUT_OFF}: n2: no answer for 1 s: the node or its network has failed, or the staging "
        "process there is stopped; submit again; if it fails again, use other nodes (--exclude) "
        "and tell the administrator"
    )


def test_ranks_that_live_but_do_not_begin_are_told_from_those_that_do_not_start(
    launcher: Launcher,
) -> None:
    message = launcher.failure(f"while {PULSES} n1 n2; do sleep 0.1; done", 1)
    assert message == (
        "MPI started, but did not connect all nodes within 1 s: a node has failed, or a firewall "
        "or another program connects to MPI's TCP ports; submit again, and tell the administrator"
    )


def again(why: str) -> dict[str, Any]:
    """The event of another start."""
    return {"event": "restarted", "why": why}


RESTARTED, HUNG = again("Slurm lost a connection between the nodes"), again("MPI does not start")
#: What Slurm says of a connection that it lost, and which does not come again.
LOST = (
    "slurmstepd-n1: error:  mpi/pmix_v4: _direct_conn_establish: n1 [0]: pmixp_server.c:1284: "
    "Connection reject from 1(n2)"
)


def test_ranks_that_slurm_does_not_connect_are_started_again(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_LOST_PATIENCE", 0.3)
    first = tmp_path / "first"
    hang = f"echo $$ >{first}; {say('LOST')} >&2; exec sleep 60"
    script = f"[ -e {first} ] || {{ {hang}; }}; {say('STARTED', 'RESULT')}"
    assert launcher.run(script, LOST=LOST, RESULT=result(DONE)) == DONE
    assert launcher.events == [RESTARTED, STARTED]
    assert _is_gone(int(first.read_text()))


def test_ranks_that_hang_are_started_again(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_HANG", 2.0)
    first = tmp_path / "first"
    hang = f"echo $$ >{first}; exec sleep 60"
    script = f"[ -e {first} ] || {{ {hang}; }}; {say('STARTED', 'RESULT')}"
    assert launcher.run(script, 30, RESULT=result(DONE)) == DONE
    assert launcher.events == [HUNG, STARTED]
    assert _is_gone(int(first.read_text()))


def test_ranks_that_hang_are_started_again_only_once(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_HANG", 0.0)
    message = launcher.failure("exec sleep 60", 2)
    assert message.startswith(f"{NOT_STARTED} within 2 s: ")
    assert launcher.events == [HUNG]


def test_a_node_that_is_late_is_waited_for_and_then_mpi(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_HANG", 2.0)
    late = f"sleep 2.5; {say('B')}; sleep 0.5"
    script = f"{say('A')}; {late}; {say('STARTED', 'RESULT')}"
    alive = {name: event("alive", node=node) for name, node in (("A", "n1"), ("B", "n2"))}
    assert launcher.run(script, 30, **alive, RESULT=result(DONE)) == DONE
    assert launcher.events == [STARTED]


def test_ranks_are_not_started_again_if_the_launcher_names_a_node(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_HANG", 0.5)
    found = blamed(launcher, f"{say('SAID')}; sleep 2", 30, SAID=not_launched("n2"))
    why = "Slurm could not start the staging process there: Communication failure"
    assert found == [("n2", why)]
    assert launcher.events == []


def test_ranks_that_begin_though_slurm_lost_a_connection_are_left_alone(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_LOST_PATIENCE", 0.3)
    script = f"{say('LOST', 'STARTED')}; sleep 0.6; {say('RESULT')}"
    assert launcher.run(script, LOST=LOST, RESULT=result(DONE)) == DONE
    assert launcher.events == [STARTED]


def test_ranks_that_slurm_never_connects_are_given_up(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_LOST_PATIENCE", 0.1)
    message = launcher.failure(f"{say('LOST')}; exec sleep 60", LOST=LOST)
    assert message == (
        f"{NOT_STARTED}: Slurm lost a connection between two nodes; submit again, and if it fails "
        f"again tell the administrator\n  {LOST}"
    )
    assert launcher.events == [RESTARTED] * 2


#: What srun says of a task that slurmstepd could not prepare, and of one that it then ends.
UNPREPARED = "srun: error: task 1 launch failed: Unspecified error"
ENDED_TOO = "srun: error: n1: task 0: Killed"


def not_launched(node: str, why: str = "Communication failure") -> str:
    """What srun says of a node that it does not reach."""
    return f"srun: error: Task launch for StepId=7.0 failed on node {node}: {why}"


def unreached(nodes: str, why: str = "Communication failure") -> str:
    """The message about such nodes."""
    return (
        f"{NOT_STARTED}: {nodes}: Slurm could not start the staging process there: {why}; submit "
        "again; if it fails again, use other nodes (--exclude) and tell the administrator"
    )


def test_a_node_on_which_srun_starts_nothing_is_named(launcher: Launcher) -> None:
    line = not_launched("n2")
    assert launcher.failure(f"{say('LINE')}; exit 233", LINE=line) == f"{unreached('n2')}\n  {line}"
    line = "srun: error: Node failure on n2"
    told = launcher.failure(f"{say('LINE')}; exit 233", LINE=line)
    assert told == f"{unreached('n2', 'it has failed')}\n  {line}"


def test_all_nodes_on_which_srun_starts_nothing_are_named_and_no_consequence(
    launcher: Launcher,
) -> None:
    lines = {
        "A": not_launched("n2"),
        "B": not_launched("n1"),
        "C": not_launched("n3", "Job credential revoked"),
        "D": UNPREPARED,
        "E": ENDED_TOO,
    }
    script = f"{say(*lines)}; exit 233"
    there = "Slurm could not start the staging process there: Communication failure"
    assert blamed(launcher, script, 10, **lines) == [("n2", there), ("n1", there)]
    assert launcher.events == [], "which another start would not mend"
    assert launcher.failure(script, 10, **lines).startswith(unreached("n[1-2]"))


@pytest.mark.parametrize("other", [UNPREPARED, LOST])
def test_a_node_that_srun_names_is_blamed_and_none_that_is_late(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setattr(run_module, "_LOST_PATIENCE", 0.1)
    named = not_launched("n2")
    script = f"{ALIVE % 'n1'} {say('OTHER', 'NAMED')}; exec sleep 60"
    why = "Slurm could not start the staging process there: Communication failure"
    assert blamed(launcher, script, 1, OTHER=other, NAMED=named) == [("n2", why)]
    told = launcher.failure(script, 1, OTHER=other, NAMED=named)
    assert told == f"{unreached('n2')}\n  {other}\n  {named}"
    assert launcher.events == []


def test_ranks_that_hang_are_left_what_is_too_short_for_another_start(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_HANG", 1.5)
    assert launcher.failure("exec sleep 60", 2) == NONE.format("sh").replace("0.3 s", "2 s")
    assert launcher.events == []


def test_ranks_of_which_slurm_cannot_start_one_are_started_again(
    launcher: Launcher, tmp_path: Path
) -> None:
    refuse = f"touch {tmp_path}/first; {say('LINE', 'ENDED')}; exit 137"
    script = f"[ -e {tmp_path}/first ] || {{ {refuse}; }}; {say('STARTED', 'RESULT')}"
    lines = {"LINE": UNPREPARED, "ENDED": ENDED_TOO}
    assert launcher.run(script, 10, **lines, RESULT=result(DONE)) == DONE
    assert launcher.events == [again("Slurm could not start a process"), STARTED]


def test_ranks_of_which_slurm_can_never_start_one_blame_no_node_that_was_ended(
    launcher: Launcher,
) -> None:
    script, lines = f"{say('LINE', 'ENDED')}; exit 137", {"LINE": UNPREPARED, "ENDED": ENDED_TOO}
    assert blamed(launcher, script, 10, **lines) == []
    assert launcher.events == [again("Slurm could not start a process")] * 2
    assert launcher.failure(script, 10, **lines) == (
        f"{NOT_STARTED}: Slurm could not start the staging process on n2; submit again, and if it "
        "fails again tell the administrator (slurmd's log there says why)\n"
        f"  {UNPREPARED}\n  {ENDED_TOO}"
    )


def test_the_last_start_has_all_that_is_left(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_HANG", 0.5)
    count = f"echo >>{tmp_path}/starts; [ $(wc -l <{tmp_path}/starts) -ge 3 ]"
    script = f"{count} || {{ {say('LINE')}; exit 1; }}; sleep 2; {say('STARTED', 'RESULT')}"
    assert launcher.run(script, 30, LINE=UNPREPARED, RESULT=result(DONE)) == DONE
    assert launcher.events == [again("Slurm could not start a process")] * 2 + [STARTED]


def test_ranks_are_not_started_again_after_the_time_for_a_start(launcher: Launcher) -> None:
    message = launcher.failure(f"{say('LINE')}; exec sleep 60", 0.5, LINE=UNPREPARED)
    assert message.startswith(f"{NOT_STARTED}: Slurm could not start the staging process on n2;")
    assert launcher.events == []


def test_a_pulse_of_an_earlier_start_is_no_sign_of_life(launcher: Launcher, tmp_path: Path) -> None:
    refuse = f"touch {tmp_path}/first; {PULSES} n1; {say('LINE')}; exit 1"
    script = f"[ -e {tmp_path}/first ] || {{ {refuse}; }}; exec sleep 60"
    message = launcher.failure(script, 2, LINE=UNPREPARED)
    assert message == NONE.format("sh").replace("0.3 s", "2 s")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("srun: error: n2: task 1: Killed", "Killed"),
        ("srun: error: n2: task 1: Out Of Memory", "Out Of Memory"),
        (
            (
                "slurmstepd: error:  mpi/pmix_v4: _errhandler: n2 [1]: pmixp_client_v2.c:211: "
                "Error handler invoked: status = -61, source = [slurm.pmix.7.0:1]"
            ),
            "it has failed",
        ),
    ],
)
def test_a_rank_that_ends_before_mpi_has_started_is_named_and_no_setting(
    launcher: Launcher, line: str, why: str
) -> None:
    many = "; ".join(
        f"echo 'srun: error: n{number}: task 0: Terminated'" for number in range(3, 20)
    )
    lines = launcher.failure(f"{say('LINE')}; {many}; exit 143", LINE=line).splitlines()
    assert lines == [
        (
            f"{NOT_STARTED}: n2: the staging process there ended first ({why}); submit again; if "
            "it fails again, use other nodes (--exclude) and tell the administrator"
        ),
        *(f"  srun: error: n{number}: task 0: Terminated" for number in range(8, 20)),
    ]


def test_of_ranks_that_srun_itself_ends_none_is_blamed(launcher: Launcher) -> None:
    """As with an MPI library that does not fit: no node is at fault."""
    message = launcher.failure("echo 'srun: error: n2: task 1: Terminated'; exit 143")
    assert message.startswith(f"{NOT_STARTED}: sh ended with code 143; ")


@pytest.mark.parametrize("last", ["RESULT", "CRASHED"])
def test_a_launcher_that_does_not_end_is_ended(launcher: Launcher, last: str) -> None:
    launcher.patience = Patience(end=0.5, crash=0.5)
    launcher.limit = 60
    script = f"{say('STARTED', last)}; exec sleep 60"
    crashed = event("crashed", node="n2", error="it was killed")
    if last == "RESULT":
        assert within(5, lambda: launcher.run(script, RESULT=result(DONE))) == DONE
    else:
        message = within(5, lambda: launcher.failure(script, CRASHED=crashed))
        assert message == f"{CUT_OFF}: n2: it was killed; submit again"


@pytest.mark.parametrize("forever", [1e9, float("inf")])
def test_a_site_may_let_ranks_begin_whenever_they_like(launcher: Launcher, forever: float) -> None:
    assert launcher.run(say("STARTED", "RESULT"), forever, RESULT=result(DONE)) == DONE


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_the_launcher_ends_with_its_listener(interrupt: type[BaseException]) -> None:
    pids: list[int] = []

    def hear(event: dict[str, Any]) -> None:
        pids.append(event["pid"])
        raise interrupt

    script = """echo '{"event": "started", "pid": '$$'}'; exec sleep 60"""
    with pytest.raises(interrupt):
        run(["/bin/sh", "-c", script], {"PATH": os.defpath}, 10, hear)
    assert [_is_gone(pid) for pid in pids] == [True]
