import ast
import importlib.util
import os
from pathlib import Path

import pytest

from services.common.config import ConfigError, engines, parse_config
from services.rollout.vllm_engine.arguments import EXTENSION, base_arguments, capture_arguments
from services.rollout.vllm_engine.environment import DEFAULTS, set_defaults


def make_config(engine=None, **sampling):
    return parse_config(
        {
            "run": {"name": "test"},
            "model": {"path": "models/tiny", "dtype": "float32", "max_length": 2048},
            "data": {"train": {"kind": "jsonl", "path": "a.jsonl"}},
            "sampling": sampling,
            "reward": {"scorers": [{"name": "exact_match"}]},
            "rollout": {"engine": engine or {}},
        }
    )


def test_the_configuration_becomes_engine_arguments():
    arguments = base_arguments(make_config({"gpu_memory_utilization": 0.4}), seed=5, cpu=False)
    assert arguments["model"] == "models/tiny"
    assert arguments["dtype"] == "float32"
    assert arguments["max_model_len"] == 2048
    assert arguments["seed"] == 5
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["max_logprobs"] == -1
    assert arguments["worker_extension_cls"] == EXTENSION
    assert arguments["gpu_memory_utilization"] == 0.4


def test_cpus_run_eagerly_unless_told_otherwise():
    assert base_arguments(make_config(), seed=0, cpu=True)["enforce_eager"] is True
    assert base_arguments(make_config(), seed=0, cpu=False)["enforce_eager"] is False
    assert base_arguments(make_config({"enforce_eager": False}), seed=0, cpu=True)["enforce_eager"] is False


def test_the_extension_turns_off_what_would_make_it_inexact():
    arguments = capture_arguments(make_config(), "worker_extension", moe=True)
    assert arguments == {"enable_prefix_caching": False, "async_scheduling": False}


@pytest.mark.parametrize(
    "engine",
    [
        {"enable_prefix_caching": True},
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram"}},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
    ],
)
def test_the_extension_refuses_what_would_make_it_inexact(engine):
    config = make_config(engine)
    with pytest.raises(ConfigError, match=f"rollout.engine.{next(iter(engine))} is"):
        capture_arguments(config, "worker_extension", moe=True)
    capture_arguments(config, "native", moe=True)


def test_native_routing_needs_prefix_caching():
    config = make_config({"enable_prefix_caching": False})
    with pytest.raises(ConfigError, match=r"rollout.engine.enable_prefix_caching is False, expected True"):
        capture_arguments(config, "native", moe=True)
    assert "enable_prefix_caching" not in capture_arguments(config, "native", moe=False)


def test_native_capture_asks_only_for_what_there_is():
    truncating, plain = make_config(top_k=20), make_config()
    assert capture_arguments(truncating, "native", moe=True) == {
        "enable_return_routed_experts": True,
        "return_sampling_mask": True,
        "enable_prefix_caching": True,
    }
    assert capture_arguments(plain, "native", moe=False) == {
        "enable_return_routed_experts": False,
        "return_sampling_mask": False,
    }


def test_the_environment_is_only_filled_in(monkeypatch):
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    set_defaults()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


def test_every_argument_that_is_taken_or_refused_by_name_is_one_of_vllms():
    """A name that vLLM has dropped would be taken at load and end the rollout."""
    (package,) = importlib.util.find_spec("vllm").submodule_search_locations
    source = ast.parse((Path(package) / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    classes = [node for node in source.body if isinstance(node, ast.ClassDef) and node.name.endswith("EngineArgs")]
    known = {
        field.target.id
        for node in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    assert len(known) > 200
    assert known >= engines.VLLM_TAKEN
    assert known >= engines.VLLM_OWNED
    assert engines.VLLM_REFUSED.keys() <= known
    assert not engines.VLLM_TAKEN & engines.VLLM_REFUSED.keys()
