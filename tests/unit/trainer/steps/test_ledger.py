import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidData
from services.trainer.steps.ledger import Ledger


def test_room_is_the_staleness_bound():
    synchronous, ahead = Ledger(4, 0), Ledger(4, 2)
    assert (synchronous.room(9), ahead.room(9)) == (4, 12)
    requests = [synchronous.issue() for _ in range(4)]
    assert synchronous.room(9) == 0
    synchronous.train(requests)
    assert synchronous.room(8) == 4


def test_room_is_no_more_than_the_rest_of_the_run_trains():
    ledger = Ledger(4, 2)
    assert [ledger.room(left) for left in (-1, 0, 1, 2, 3, 4)] == [0, 0, 4, 8, 12, 12]


@pytest.mark.parametrize(("groups", "staleness", "room"), [(4, 1, 8), (64, 1, 128), (16, 0, 16), (16, 4, 80)])
def test_a_start_with_another_size_counts_from_what_is_outstanding(groups, staleness, room):
    before = Ledger(16, 1)
    before.train([before.issue() for _ in range(64)])
    after = Ledger(groups, staleness)
    after.restore(before.dump())
    assert after.room(100) == room


def test_what_is_beyond_a_smaller_bound_is_put_back_and_issued_again_first():
    before = Ledger(4, 1)
    for _ in range(8):
        before.issue()
    after = Ledger(1, 1)
    after.restore(before.dump())
    assert after.withhold(100, sampled={6}) == [1, 2, 3, 4, 5, 7]
    assert (sorted(after.outstanding), after.room(100), after.trained) == ([0, 6], 0, 0)
    after.train([0, 6])
    assert [after.issue(), after.issue()] == [1, 2]
    assert after.outstanding == {1: 1, 2: 1}


def test_a_checkpoint_from_before_anything_was_put_back_is_taken_up():
    ledger = Ledger(2, 0)
    ledger.restore({"cursor": 2, "outstanding": {"1": 1}, "lost": []})
    assert (ledger.trained, ledger.outstanding, ledger.withheld) == (1, {1: 1}, {})


def test_a_lost_group_makes_room_for_another():
    ledger = Ledger(2, 0)
    ledger.issue(), ledger.issue()
    ledger.lose(0)
    assert ledger.room(9) == 1
    assert (ledger.issue(), ledger.room(9)) == (2, 0)


def test_nothing_is_trained_twice():
    ledger = Ledger(2, 0)
    ledger.issue()
    ledger.train([0])
    with pytest.raises(InvalidData, match="request 0 is not outstanding"):
        ledger.train([0])
    with pytest.raises(InvalidData):
        ledger.reissue(0)


def test_attempts_count_up():
    ledger = Ledger(2, 0)
    ledger.issue()
    assert [ledger.reissue(0), ledger.reissue(0)] == [1, 2]


def test_only_the_newest_attempt_is_awaited():
    ledger = Ledger(2, 0)
    ledger.issue()
    assert ledger.awaits(0, 0)
    # The ledger may be of a checkpoint from before the attempt that failed.
    assert (ledger.next_attempt(0, failed=2), ledger.reissue(0, failed=2)) == (3, 3)
    assert [ledger.awaits(0, attempt) for attempt in (2, 3)] == [False, True]
    ledger.lose(0)
    assert not ledger.awaits(0, 3)


@given(st.lists(st.sampled_from(["issue", "train", "lose", "reissue"]), max_size=60), st.randoms())
def test_every_issue_is_in_exactly_one_place_and_survives_a_restart(actions, random):
    ledger = Ledger(3, 1)
    trained: set[int] = set()
    for action in actions:
        if action == "issue":
            ledger.issue()
        elif ledger.outstanding:
            request = random.choice(sorted(ledger.outstanding))
            if action == "train":
                ledger.train([request])
                trained.add(request)
            else:
                getattr(ledger, action)(request)
        back = Ledger(3, 1)
        back.restore(ledger.dump())
        assert back == ledger
        assert ledger.trained == len(trained)
        assert trained | ledger.outstanding.keys() | ledger.lost == set(range(ledger.cursor))


@pytest.mark.parametrize(
    "state",
    [
        {"cursor": 2, "outstanding": {"2": 0}, "lost": []},
        {"cursor": 2, "outstanding": {"1": 0}, "lost": [1]},
        {"cursor": 2, "outstanding": {}, "lost": [-1]},
        {"cursor": 2, "outstanding": {"1": 0}, "withheld": {"1": 0}, "lost": []},
    ],
)
def test_an_impossible_state_is_refused(state):
    with pytest.raises(InvalidData, match="cursor"):
        Ledger(2, 0).restore(state)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=6),
    st.randoms(),
)
def test_any_sequence_of_configurations_trains_on_within_its_staleness(configurations, random):
    """Each start has its own groups_per_step and max_staleness and lasts some steps; groups come in any order."""
    state, sampled_under, trained = Ledger(1, 0).dump(), {}, []
    step, steps = 0, sum(lasts for *_, lasts in configurations)
    for groups, staleness, lasts in configurations:
        ledger = Ledger(groups, staleness)
        ledger.restore(state)
        ledger.withhold(steps - step, sampled_under)
        sampled_under = {request: sampled_under[request] for request in ledger.outstanding}
        for _ in range(lasts):
            for _ in range(ledger.room(steps - step)):
                sampled_under[ledger.issue()] = step
            for request, version in sampled_under.items():
                if step - version > staleness:
                    ledger.reissue(request)
                    sampled_under[request] = step
            assert groups <= len(ledger.outstanding) <= (1 + staleness) * groups
            chosen = random.sample(sorted(sampled_under), groups)
            assert all(step - sampled_under.pop(request) <= staleness for request in chosen)
            ledger.train(chosen)
            trained += chosen
            step += 1
        state = ledger.dump()
    assert len(set(trained)) == len(trained) == ledger.trained
    assert not ledger.outstanding
