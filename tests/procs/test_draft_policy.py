"""When to draft: the choice is the faster kind of step, found soon, kept, and looked at again."""

import random

import pytest

from procs.draft_policy import DraftPolicy
from shm.limits import STEPS_IN_FLIGHT


class Machine:
    """Steps of a server: one with drafts takes `longer` times as long, and each of its rows gains `gain` tokens."""

    def __init__(self, policy: DraftPolicy, seed: int = 0) -> None:
        self.policy, self.chance = policy, random.Random(seed)
        self.tokens = self.ns = self.drafted = self.steps = 0
        self.slower = 1.0  # than in the beginning
        self.queue: list[int] = []  # windows of the steps that were launched, and not seen

    def run(self, steps: int, rows: int, longer: float, gain: float, noise: float = 0.1) -> float:
        """Run some; returns tokens of a row per time of a plain step. Results come two steps late."""
        tokens, ns, queue = 0, 0, self.queue
        for _ in range(steps):
            queue.append(self.policy.drafts(rows) + 1)
            self.drafted += queue[-1] > 1
            self.steps += 1
            if len(queue) == STEPS_IN_FLIGHT:
                window = queue.pop(0)
                took = int(
                    1e6 * self.slower * (longer if window > 1 else 1) * self.chance.uniform(1 - noise, 1 + noise)
                )
                gained = sum(1 + (window > 1) * self.gained(gain, window) for _ in range(rows))
                if window > 1:
                    self.policy.gained(rows, gained)
                self.policy.took(rows, window > 1, took)
                tokens, ns = tokens + gained, ns + took
        return tokens / rows / (ns / 1e6)

    def gained(self, gain: float, window: int) -> int:
        whole = int(gain - 1)
        return min(window - 1, whole + (self.chance.random() < gain - 1 - whole))


def machine(drafts: int = 3, *, always: bool = False, seed: int = 0) -> Machine:
    return Machine(DraftPolicy(drafts, always=always), seed)


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 200])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_pay_are_kept(rows: int, seed: int) -> None:
    server = machine(seed=seed)
    assert server.run(1000, rows, longer=1.3, gain=1.8) > 0.95 * 1.8 / 1.3


@pytest.mark.parametrize("rows", [1, 2, 8, 32, 200])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_do_not_pay_cost_next_to_nothing(rows: int, seed: int) -> None:
    server = machine(seed=seed)
    assert server.run(150, rows, longer=3.3 if rows > 2 else 1.6, gain=1.3) > 0.93
    assert server.run(3000, rows, longer=3.3 if rows > 2 else 1.6, gain=1.3) > 0.985


def test_it_resumes_when_texts_become_predictable_and_stops_when_not() -> None:
    server = machine()
    server.run(600, 1, longer=1.5, gain=1.1)
    before = server.drafted
    assert server.run(3000, 1, longer=1.5, gain=3.0) > 1.6
    assert server.drafted > before + 2000
    before = server.drafted
    assert server.run(2000, 1, longer=1.5, gain=1.05) > 0.93
    assert server.drafted < before + 200


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bad", [600, 6000])
def test_however_long_it_did_not_pay_it_resumes_with_the_first_trial(bad: int, seed: int) -> None:
    server = machine(seed=seed)
    server.run(bad, 1, longer=1.5, gain=1.1)
    before = server.drafted
    server.run(700, 1, longer=1.5, gain=2.3)
    assert server.drafted > before + 60


def test_it_notices_when_plain_steps_have_become_faster() -> None:
    """Steps with drafts take what they took, so nothing but a trial can tell."""
    server = machine()
    server.run(3000, 1, longer=1.3, gain=1.8)
    server.slower = 0.5
    server.run(1024, 1, longer=2.6, gain=1.8)
    before = server.drafted
    server.run(128, 1, longer=2.6, gain=1.8)
    assert server.drafted - before < 64


def test_a_machine_of_moods_does_not_shake_it() -> None:
    server = machine()
    server.run(200, 4, longer=1.2, gain=2.2)
    assert server.run(3000, 4, longer=1.2, gain=2.2, noise=0.6) > 0.95 * 2.2 / 1.2


def test_trials_whose_results_are_lost_end_all_the_same() -> None:
    policy = DraftPolicy(3, always=False)
    launched = []
    for _ in range(400):
        launched.append(policy.drafts(1) > 0)
        if not launched[-1]:
            policy.took(1, False, 1000)  # steps with drafts are never heard of
    assert not launched[-1] and any(launched[50:]), "it goes on, and tries again"


def test_a_dip_after_long_success_is_soon_over() -> None:
    server = machine()
    server.run(9000, 1, longer=1.3, gain=1.9)
    server.run(60, 1, longer=1.3, gain=1.0)
    before = server.drafted
    assert server.run(1800, 1, longer=1.3, gain=3.0) > 2.1
    assert server.drafted > before + 1500


@pytest.mark.parametrize("gain", [1.5, 1.8])
def test_steps_that_get_longer_with_their_texts_are_compared_with_steps_of_then(gain: float) -> None:
    """A request of 500 steps that become half as long again, and the next one begins anew."""
    server = machine()
    for _ in range(20):
        for part in range(10):
            server.slower = 1 + part / 20
            server.run(50, 1, longer=1.25, gain=gain)
    assert server.drafted > 0.8 * server.steps


def test_a_first_step_that_is_slow_for_once_does_not_decide() -> None:
    server = machine()
    for _ in range(2):
        server.run(2, 32, longer=5.0, gain=2.0)  # one step of each kind, and what is made once is made then
    assert server.run(400, 32, longer=1.2, gain=2.0) > 0.95 * 2.0 / 1.2


@pytest.mark.parametrize("rows", [1, 2, 5, 32, 200])
def test_a_trial_launches_no_more_steps_than_it_looks_at(rows: int) -> None:
    server = machine()
    server.run(100, rows, longer=4.0, gain=1.2)
    assert server.drafted == max(2, 8 // rows)


def test_batches_of_about_one_size_share_a_trial_and_powers_of_two_are_in_their_middle() -> None:
    policy, launched = DraftPolicy(3, always=False), []
    for rows in [32, 31, 33, 29, 40, 24, 32, 45] * 10:
        launched.append((rows, policy.drafts(rows) > 0))
        if len(launched) > 1:
            seen, drafted = launched[-2]
            policy.took(seen, drafted, 4000 if drafted else 1000)
    assert sum(drafted for _, drafted in launched) == 2


def test_steps_with_chunks_have_no_part_in_trials() -> None:
    policy = DraftPolicy(3, always=False)
    for _ in range(2):
        policy.took(16, False, 10**6)
    assert policy.drafts(16) == 3 and policy.drafts(16, mixed=True) == 0


def test_a_larger_batch_does_not_repeat_what_a_smaller_one_found_out() -> None:
    server = machine()
    server.run(60, 4, longer=3.0, gain=1.2)
    before = server.drafted
    server.run(60, 8, longer=3.0, gain=1.2)
    assert before >= 1 and server.drafted == before


def test_batches_are_judged_by_themselves() -> None:
    server = machine()
    for _ in range(30):
        server.run(30, 1, longer=1.2, gain=1.8)
        server.run(30, 16, longer=3.0, gain=1.8)
    assert server.policy.drafts(1) == 3 and server.policy.drafts(16) == 0


def test_always_is_always_and_no_drafts_are_none() -> None:
    server = machine(always=True)
    server.run(50, 4, longer=9.0, gain=1.0)
    assert server.drafted == server.steps
    server = machine(drafts=0)
    server.run(50, 4, longer=9.0, gain=1.0)
    assert server.drafted == 0


def test_a_step_of_chunks_alone_has_no_say() -> None:
    assert machine().policy.drafts(0) == 3
