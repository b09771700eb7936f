"""python -m tests.support.rollout.process --config FILE: the rollout's own process around an engine without a model."""

import asyncio
import sys

from services.common.config import load_config
from services.common.transport.client import connect
from services.common.transport.outages import Outages
from services.rollout.__main__ import Rollout
from tests.support.rollout.fakes import FakeEngine

if __name__ == "__main__":
    config = load_config(sys.argv[sys.argv.index("--config") + 1])
    rollout = Rollout(config, "r1", connect(config.redis), FakeEngine(), Outages(60.0))
    sys.exit(asyncio.run(rollout.serve()))
