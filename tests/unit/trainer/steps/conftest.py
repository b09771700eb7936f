import pytest

from services.common.config import parse_config
from services.common.transport import outages
from services.trainer.steps import orchestrator, pair_feed
from tests.support.trainer.orchestration import GROUPS, SIZE, Play


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """What a test expects to come is there before it is waited for: only what does not come takes so long."""
    for module in (orchestrator, pair_feed):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(outages, "FIRST_SECONDS", 0.01)


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
