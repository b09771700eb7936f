import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import grpc
import pytest
import structlog
import yaml
from trivet.v1 import reward_pb2, reward_pb2_grpc, sample_pb2

from services.common.config import RedisConfig, RewardConfig, ServerConfig, parse_config
from services.common.serving.server import ServiceServer
from services.common.transport.streams import RunStreams
from services.reward.__main__ import serve
from services.reward.isolation.pool import ScorerPool
from services.reward.score import GroupScorer
from services.reward.service import RewardServicer
from services.reward.stats import RewardStats


def group(*texts, group_id="g1", metadata=None):
    return sample_pb2.Group(
        prompt=sample_pb2.Prompt(group_id=group_id, text="p", metadata_json=json.dumps(metadata or {"answer": "12"})),
        samples=[sample_pb2.Sample(sample_id=f"{group_id}/0/{i}", index=i, text=text) for i, text in enumerate(texts)],
    )


@pytest.fixture
async def stub(request):
    name = getattr(request, "param", "exact_match")
    config = RewardConfig(scorers=[{"name": name}], retries=0)
    stats, pool = RewardStats(), ScorerPool(config.scorers, workers=1, timeout_seconds=10)
    await pool.start()
    scorer = GroupScorer(config, pool, stats, "reward-1")
    servicer = RewardServicer(scorer, stats, reward_id="reward-1", scorers=pool.labels, concurrent_groups=1)
    server = ServiceServer(
        ServerConfig(),
        grpc_name="trivet.v1.RewardService",
        register=lambda grpc_server: reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, grpc_server),
        ready=lambda: None,
    )
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield reward_pb2_grpc.RewardServiceStub(channel)
    await server.stop()
    await pool.stop()


async def test_score_returns_rewards_or_a_failure_and_status_counts_both(stub):
    response = await stub.Score(reward_pb2.ScoreRequest(group=group("12", "21")), timeout=10)
    assert response.WhichOneof("outcome") == "scored"
    assert [score.reward for score in response.scored.scores] == [1.0, 0.0]
    response = await stub.Score(reward_pb2.ScoreRequest(group=group("12", metadata={"no": "answer"})), timeout=10)
    assert response.WhichOneof("outcome") == "failure"
    assert (response.failure.code, response.failure.sample_id) == ("scorer_metadata", "g1/0/0")
    status = await stub.GetStatus(reward_pb2.RewardServiceGetStatusRequest(), timeout=10)
    assert (status.groups, status.samples, status.failures, status.running_groups) == (1, 2, 1, 0)
    assert (status.mean_reward, list(status.scorers), status.reward_id) == (0.5, ["exact_match"], "reward-1")


async def test_a_bad_group_is_an_invalid_argument(stub):
    with pytest.raises(grpc.aio.AioRpcError, match="group_size") as caught:
        await stub.Score(reward_pb2.ScoreRequest(group=group()), timeout=10)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("stub", ["tests.support.reward.evil_scorers:outcome"], indirect=True)
async def test_whatever_a_scorer_does_is_answered(stub):
    for name, code in [("surrogate", "scorer_error"), ("huge int", "reward_not_finite"), ("abort", "scorer_crash")]:
        response = await stub.Score(reward_pb2.ScoreRequest(group=group(name)), timeout=10)
        assert response.failure.code == code
    response = await stub.Score(reward_pb2.ScoreRequest(group=group("fine")), timeout=10)
    assert response.scored.scores[0].reward == 1.0


async def test_a_refusal_fits_into_a_header(stub):
    with pytest.raises(grpc.aio.AioRpcError, match="group_size") as caught:
        await stub.Score(reward_pb2.ScoreRequest(group=group(group_id="g" * 100_000)), timeout=10)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("stub", ["tests.support.reward.scorers:meets"], indirect=True)
async def test_calls_beyond_the_limit_are_refused(stub, open_path):
    done = open_path / "done"
    metadata = {"me": str(open_path / "begun"), "other": str(done)}
    slow = asyncio.ensure_future(stub.Score(reward_pb2.ScoreRequest(group=group("x", metadata=metadata)), timeout=30))
    async with asyncio.timeout(10):
        while (await stub.GetStatus(reward_pb2.RewardServiceGetStatusRequest())).running_groups == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Score(reward_pb2.ScoreRequest(group=group("y", metadata=metadata)), timeout=10)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    done.touch()
    assert (await slow).WhichOneof("outcome") == "scored"


def config_tree(tmp_path, redis_url):
    return {
        "run": {"name": f"run-{uuid.uuid4().hex[:8]}", "directory": str(tmp_path)},
        "redis": {"url": redis_url},
        "model": {"path": "unused", "max_length": 64},
        "data": {"train": {"kind": "jsonl", "path": "unused.jsonl"}, "max_prompt_tokens": 32},
        "sampling": {"max_tokens": 16},
        "reward": {"scorers": [{"name": "no_such_scorer"}]},
    }


def start_service(tmp_path, redis_url):
    tree = config_tree(tmp_path, redis_url)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "services.reward",
                "--config",
                str(path),
                "--set",
                "reward.scorers=[{name: exact_match}]",
            ],
            stderr=stderr,
            env=environment,
        )
    return tree["run"]["name"], process, log


def test_the_service_scores_from_redis_and_stops_within_five_seconds(tmp_path, redis_client, redis_url):
    name, process, log = start_service(tmp_path, redis_url)
    try:
        streams = RunStreams(redis_client, name, RedisConfig(url=redis_url))
        streams.samples("test").add(group("12", "21"))
        (entry,) = _read_one(streams.scored("trainer"), process, log)
        assert [score.reward for score in entry.message.scores] == [1.0, 0.0]
        workers = _children(process.pid)
        assert workers
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0, log.read_text()
        assert time.monotonic() - start < 5
        assert re.search(r'"grpc_port": \d+', log.read_text())
        while left := [pid for pid in workers if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() - start < 10, left
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait(5)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("exact_mach", "name is 'exact_mach', expected one of ['exact_match'"),
        (
            "tests.support.reward.scorers:absent",
            "module tests.support.reward.scorers has no function 'absent'",
        ),
    ],
)
async def test_an_unknown_scorer_ends_the_service_at_once_with_a_sentence(tmp_path, redis_url, name, sentence):
    tree = config_tree(tmp_path, redis_url)
    tree["reward"]["scorers"] = [{"name": name}]
    with structlog.testing.capture_logs() as lines:
        assert await serve(parse_config(tree)) == 2
    assert sentence in lines[-1]["reason"]


def test_the_service_stops_although_redis_is_unreachable(tmp_path):
    _, process, log = start_service(tmp_path, "redis://127.0.0.1:1")
    try:
        deadline = time.monotonic() + 20
        while "serving" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert time.monotonic() - start < 5
    finally:
        process.kill()
        process.wait(5)


def _read_one(stream, process, log):
    deadline = time.monotonic() + 30
    while not (entries := stream.read(1, 1.0)):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
    return entries


def _children(parent):
    """Of any thread, and theirs."""
    found, waiting = [], [parent]
    while waiting:
        for children in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            pids = [int(child) for child in children.read_text().split()]
            found += pids
            waiting += pids
    return found
