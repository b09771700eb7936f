import pytest

from services.common.transport import consumer, outages
from services.rollout.weights import follower


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """Between two looks at Redis."""
    monkeypatch.setattr(follower, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(consumer, "READ_SECONDS", 0.05)
    monkeypatch.setattr(outages, "FIRST_SECONDS", 0.01)
