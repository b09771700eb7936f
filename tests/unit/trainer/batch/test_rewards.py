import numpy as np
import pytest
from trivet.v1 import sample_pb2

from services.common.config import parse_config
from services.trainer.batch.rewards import advantages_in_groups, shaped_rewards


def config(**algorithm):
    return parse_config(
        {
            "run": {"name": "run"},
            "model": {"path": "model"},
            "data": {"train": {"kind": "jsonl", "path": "train.jsonl"}},
            "sampling": {"max_tokens": 10},
            "algorithm": algorithm,
            "reward": {"scorers": [{"name": "exact_match"}]},
        }
    )


def group(*samples: tuple[int, float]) -> sample_pb2.ScoredGroup:
    """Each sample is a length and a reward."""
    return sample_pb2.ScoredGroup(
        group=sample_pb2.Group(
            prompt=sample_pb2.Prompt(sampling=sample_pb2.SamplingParameters(max_tokens=10)),
            samples=[sample_pb2.Sample(token_ids=[1] * length) for length, _ in samples],
        ),
        scores=[sample_pb2.Score(reward=reward) for _, reward in samples],
    )


def test_without_a_buffer_rewards_stay():
    assert shaped_rewards([group((3, 1.0), (10, 0.5)), group((2, 0.0))], config()) == [[1.0, 0.5], [0.0]]


def test_answers_in_the_overlong_buffer_pay():
    shaped = shaped_rewards([group((6, 1.0), (8, 1.0), (10, 1.0)), group((9, 0.0))], config(overlong_buffer=4))
    np.testing.assert_allclose(np.concatenate(shaped), [1.0, 0.5, 0.0, -0.75], rtol=1e-12)


@pytest.mark.parametrize(("limit", "expected"), [(8, [1.0, 0.5, 0.0]), (3, [0.0, 0.0, 0.0])])
def test_answers_pay_by_the_limit_that_they_were_sampled_under(limit, expected):
    scored = group((4, 1.0), (6, 1.0), (8, 1.0))
    scored.group.prompt.sampling.max_tokens = limit
    assert shaped_rewards([scored], config(overlong_buffer=4)) == [expected]


def test_advantages_are_relative_to_the_group_and_keep_its_order():
    none = advantages_in_groups([[0.0, 1.0], [5.0, 5.0, 8.0]], "none")
    assert none == [[-0.5, 0.5], [-1.0, -1.0, 2.0]]
    std = advantages_in_groups([[0.0, 1.0], [5.0, 5.0]], "std")
    assert std[0] == pytest.approx([-1 / np.sqrt(2), 1 / np.sqrt(2)], rel=1e-5)
    assert std[1] == [0.0, 0.0]
