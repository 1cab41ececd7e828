"""How the GPU check runs and judges mutants of the step program: one that dies or hangs spoils no other."""

import json
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from gpu.device.mutations import RECORD, WAIT, Edge
from tools.gpu_check_mutants import Outcome, Run, Runner, check_steps, judge, mutations

EDGES = [Edge(RECORD, "done", "forward"), Edge(WAIT, "done", "copy"), Edge(RECORD, "published", "forward")]
# A program that does as the name of an edge says, and by itself does what a sound program under check does.
STANDIN = """
import json, os, sys, time
EDGES, ODD = json.loads(sys.argv[1])
print("ready", flush=True)
done = 0
for line in sys.stdin:
    run = json.loads(line)
    name = f"{run['edge'][1]} {run['how']}" if run["edge"] else "sound"
    odd = {} if run["slow"] else ODD.get(name, {})
    if odd == "dies":
        os._exit(7)
    if odd == "hangs":
        time.sleep(60)
    answer = {"flagged": "x" if run["edge"] else "", "wrong": "", "mutated": int(run["edge"] is not None)}
    answer |= {"edges": EDGES, "usable": True} | odd
    done += 1
    print(json.dumps(answer), flush=True)
"""


def checked(**odd: Any) -> tuple[dict[str, Any], str]:
    """The figures, and why it failed. odd: by `family_how`, what is unusual of the runs in which nothing is slow."""
    figures: dict[str, Any] = {}
    given = json.dumps([EDGES, {name.replace("_", " "): what for name, what in odd.items()}])
    seconds = 1 if "hangs" in odd.values() else 60
    with Runner([sys.executable, "-c", STANDIN, given], seconds) as runner:
        try:
            check_steps(runner, ("", "copy"), SimpleNamespace(add=figures.__setitem__))  # type: ignore[arg-type]
        except AssertionError as problem:
            return figures, str(problem)
    return figures, ""


def test_all_mutants_are_run_in_one_process() -> None:
    figures, failure = checked(done_early={"mutated": 0})
    assert failure == ""
    assert set(figures) == {
        "all edges", "processes", "forward records done, dropped", "copy waits for done, dropped",
        "forward records published, dropped", "forward records published, too early",
    }  # fmt: skip
    assert figures["forward records done, dropped"] == "flagged, wrong in 0 of 2"
    assert figures["processes"] == 1


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ("dies", "flagged, wrong in 1 of 2"),
        ("hangs", "flagged, wrong in 1 of 2"),
        ({"usable": False, "wrong": "CUDA error"}, "flagged, wrong in 1 of 2"),
    ],
)
def test_a_mutant_that_ends_its_process_spoils_no_other(odd: Any, says: str) -> None:
    figures, failure = checked(published_drop=odd)
    assert failure == ""
    assert figures["forward records published, dropped"] == says
    assert figures["forward records done, dropped"] == "flagged, wrong in 0 of 2"
    assert figures["processes"] == 2


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"published_drop": {"flagged": ""}}, "forward records published, dropped: NOT flagged"),
        ({"published_early": {"flagged": "", "wrong": "tokens"}}, "published, too early: NOT flagged, wrong in 1 of 2"),
        ({"sound": {"wrong": "tokens [1]"}}, "with a slow nothing: tokens [1]"),
        ({"sound": {"flagged": "nothing orders"}}, "nothing orders"),
        ({"sound": "dies"}, "the process ended with 7"),
        ({"sound": "hangs"}, "no answer in time"),
    ],
)
def test_what_must_not_be_fails(odd: dict[str, Any], says: str) -> None:
    assert says in checked(**odd)[1]


def test_what_nobody_could_look_at_is_not_flagged() -> None:
    assert judge([Outcome(None, "died")] * 2) == (False, "NOT flagged, wrong in 2 of 2")
    assert judge([Outcome(None, "died"), Outcome("x", "")]) == (True, "flagged, wrong in 1 of 2")


def test_a_program_that_does_not_start_is_no_mutant() -> None:
    with Runner([sys.executable, "-c", "raise SystemExit(3)"]) as runner, pytest.raises(RuntimeError, match="with 3"):
        runner.run(Run())


def test_mutations_have_names_and_runs_survive_their_way() -> None:
    names = {mutation.name: mutation for mutation in mutations(EDGES)}
    assert len(names) == 5
    for mutation in names.values():
        assert asdict(Run(**json.loads(json.dumps(asdict(mutation)))))["how"] == mutation.how
