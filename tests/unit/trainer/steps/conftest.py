import pytest

from services.common.config import parse_config
from tests.support.orchestration import GROUPS, SIZE, Play


@pytest.fixture
def config(redis_config):
    source = {"kind": "jsonl", "path": "train.jsonl"}
    return parse_config(
        {
            "run": {"name": "run"},
            "redis": redis_config.model_dump(),
            "model": {"path": "model"},
            "data": {"train": source},
            "sampling": {"group_size": SIZE},
            "evaluation": {"prompts": 2, "samples": 2, "timeout_seconds": 5},
            "reward": {"scorers": [{"name": "exact_match"}]},
            "trainer": {"groups_per_step": GROUPS, "max_staleness": 1, "steps": 10, "max_lost_groups": 3},
        }
    )


@pytest.fixture
def play(config, redis_client):
    return Play(config, redis_client)
