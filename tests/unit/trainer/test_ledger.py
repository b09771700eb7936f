import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidData
from services.trainer.ledger import Ledger


def test_room_is_the_staleness_bound():
    synchronous, ahead = Ledger(4, 0), Ledger(4, 2)
    assert (synchronous.room(0), ahead.room(0)) == (4, 12)
    for _ in range(4):
        synchronous.issue()
    assert (synchronous.room(0), synchronous.room(1)) == (0, 4)


def test_a_lost_group_makes_room_for_another():
    ledger = Ledger(2, 0)
    ledger.issue(), ledger.issue()
    ledger.lose(0)
    assert ledger.room(0) == 1
    assert (ledger.issue(), ledger.room(0)) == (2, 0)


def test_nothing_is_trained_twice():
    ledger = Ledger(2, 0)
    ledger.issue()
    ledger.train([0])
    with pytest.raises(InvalidData, match="issue 0 is not outstanding"):
        ledger.train([0])
    with pytest.raises(InvalidData):
        ledger.reissue(0)


def test_attempts_count_up():
    ledger = Ledger(2, 0)
    ledger.issue()
    assert [ledger.reissue(0), ledger.reissue(0)] == [1, 2]


@given(st.lists(st.sampled_from(["issue", "train", "lose", "reissue"]), max_size=60), st.randoms())
def test_every_issue_is_in_exactly_one_place_and_survives_a_restart(actions, random):
    ledger = Ledger(3, 1)
    trained: set[int] = set()
    for action in actions:
        if action == "issue":
            ledger.issue()
        elif ledger.outstanding:
            issue = random.choice(sorted(ledger.outstanding))
            if action == "train":
                ledger.train([issue])
                trained.add(issue)
            else:
                getattr(ledger, action)(issue)
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
    ],
)
def test_an_impossible_state_is_refused(state):
    with pytest.raises(InvalidData, match="cursor"):
        Ledger(2, 0).restore(state)
