"""Two vLLM engines serve all tests here: a start takes as long as a dozen tests."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.common.config import Config, WeightsConfig
from services.common.transport.weight_feed import describe_weights
from services.rollout.vllm_engine.environment import set_defaults
from tests.support.rollout.vllm_models import configuration, make_model

SESSION = {"scope": "session", "loop_scope": "session"}
WHOLE_PROMPTS = {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("models")
    return {seed: make_model(root / f"model-{seed}", seed) for seed in (1, 2, 3)}


@contextlib.asynccontextmanager
async def launched(config: Config, transfer: str):
    set_defaults()
    from services.rollout.vllm_engine.engine import VllmEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "services.rollout.vllm_engine.arguments.EXTENSION", "tests.support.rollout.cpu_transfer.Extension"
        )
        engine = VllmEngine(config.model_copy(update={"weights": WeightsConfig(transfer=transfer)}), seed=7)
        await engine.launch()
        try:
            yield engine
        finally:
            await engine.close()


@pytest_asyncio.fixture(**SESSION)
async def first_engine(paths) -> AsyncIterator:
    async with launched(configuration(paths[1], top_k=20), "nccl") as engine:
        yield engine


@pytest_asyncio.fixture(**SESSION)
async def second_engine(paths) -> AsyncIterator:
    config = configuration(paths[1], "processed_logits", engine=WHOLE_PROMPTS, top_k=20, top_p=0.8)
    async with launched(config, "ipc") as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="session")
async def engine(first_engine, paths):
    """As configured by default, weights from memory by NCCL; every test starts from version 0."""
    await first_engine.load_weights(describe_weights(paths[1], 0))
    return first_engine


@pytest_asyncio.fixture(loop_scope="session")
async def whole_prompt_engine(second_engine, paths):
    """Prefills no prompt in parts, reports `processed_logits`, weights from memory by CUDA IPC; from version 0, too."""
    await second_engine.load_weights(describe_weights(paths[1], 0))
    return second_engine
