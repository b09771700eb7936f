"""What surrounds DeepSpeed and needs none of it."""

import ast
import json
import random
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import services
from services.common.config import Config, ConfigError, engines, parse_config
from services.common.errors import InvalidData
from services.trainer.engine.deepspeed_config import deepspeed_config, inference_config
from services.trainer.engine.identity import (
    Identity,
    Saved,
    check_identity,
    check_shards,
    restore_random_state,
    write_identity,
    write_random_state,
)
from services.trainer.export.policy_files import copy_tokenizer
from services.trainer.model.policy import Policy
from tests.support.trainer.model_families import make_model

ROOT = Path(services.__file__).parent


def configuration(**trainer: Any) -> Config:
    return parse_config(
        {
            "run": {"name": "parts"},
            "model": {"path": "models/none"},
            "data": {"train": {"kind": "jsonl", "path": "none.jsonl"}},
            "reward": {"scorers": [{"name": "exact_match"}]},
            "trainer": trainer,
        }
    )


def test_deepspeed_is_imported_by_two_modules() -> None:
    importers = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.split(".")[0] == "deepspeed" for name in names):
                importers.add(path.relative_to(ROOT).as_posix())
    assert importers == {"trainer/engine/deepspeed_engine.py", "trainer/engine/zero_sharding.py"}


def test_a_model_other_than_the_policy_has_no_optimizer_and_a_dtype_of_its_own() -> None:
    extra = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
    config = configuration(zero_stage=3, deepspeed=extra)
    for dtype in (torch.float32, torch.bfloat16):
        made = inference_config(config, dtype)
        assert made["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu"}}
        assert made["bf16"] == {"enabled": dtype == torch.bfloat16}
    assert deepspeed_config(config)["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_further_deepspeed_keys_are_merged_into_sections() -> None:
    made = deepspeed_config(
        configuration(
            zero_stage=3,
            optimizer={"max_grad_norm": 0.7},
            deepspeed={"zero_optimization": {"overlap_comm": False}, "wall_clock_breakdown": True},
        )
    )
    assert made["zero_optimization"] == {"stage": 3, "overlap_comm": False}
    assert made["gradient_clipping"] == 0.7
    assert made["bf16"] == {"enabled": True}
    assert made["wall_clock_breakdown"] is True


@pytest.mark.parametrize(
    "extra", [{"bf16": {"enabled": False}}, {"optimizer": {}}, {"zero_optimization": {"stage": 2}}], ids=str
)
def test_deepspeed_keys_that_trivet_owns_are_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.deepspeed sets .*which Trivet sets itself"):
        deepspeed_config(configuration(deepspeed=extra))


def draws() -> list[float]:
    return [float(torch.rand(())), float(np.random.random()), random.random(), random.gauss(0, 1)]


def test_random_states_come_back(tmp_path: Path) -> None:
    random.gauss(0, 1)
    np.random.standard_normal()
    write_random_state(tmp_path, 1)
    first = draws()
    assert draws() != first
    restore_random_state(tmp_path, 1, saved_ranks=2)
    assert draws() == first


def test_a_rank_without_a_random_state_derives_its_own_from_the_first(tmp_path: Path) -> None:
    write_random_state(tmp_path, 0)
    first = draws()
    derived = []
    for rank in (1, 2, 1):
        restore_random_state(tmp_path, rank, saved_ranks=1)
        derived.append(draws())
    assert derived[0] == derived[2]
    assert all(left != right for left, right in zip(derived[0], derived[1], strict=True))
    assert all(left != right for left, right in zip(derived[0], first, strict=True))


@pytest.mark.parametrize("content", [None, b"", b"\x00" * 100], ids=["missing", "empty", "zeros"])
def test_a_broken_random_state_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "random-0.safetensors").write_bytes(content)
    with pytest.raises(InvalidData, match="is not a random state") as refused:
        restore_random_state(tmp_path, 0, saved_ranks=1)
    assert refused.value.code == "checkpoint_incomplete"


def test_an_identity_tells_models_and_settings_apart(tmp_path: Path) -> None:
    config = configuration()
    mine = Identity.of(Policy(make_model("qwen3")), config, 2)
    write_identity(tmp_path, mine, 17, "digest")
    assert check_identity(tmp_path, mine) == Saved(17, config.trainer.zero_stage, 2, "digest")
    for other, field, key in [
        (Identity.of(Policy(make_model("qwen3", num_hidden_layers=1)), config, 2), "parameters", "model.path"),
        (Identity.of(Policy(make_model("cohere")), config, 2), "model_type", "model.path"),
        (replace(mine, dtype="float16"), "dtype", "model.dtype"),
        (Identity.of(Policy(make_model("qwen3"), value_head=True), config, 2), "value_head", "algorithm.name"),
        (replace(mine, critic="a critic"), "critic", "algorithm.critic"),
    ]:
        with pytest.raises(InvalidData, match=f"{field} is .*, expected .*: give {key}.* the old value") as refused:
            check_identity(tmp_path, other)
        assert refused.value.code == "checkpoint_mismatch"


@pytest.mark.parametrize("saver", [1, 2, 3])
@pytest.mark.parametrize("loader", [1, 2, 3])
def test_only_zero_3_keeps_its_state_to_itself(tmp_path: Path, saver: int, loader: int) -> None:
    write_identity(tmp_path, Identity("qwen3", "0", "float32", saver, 2), 3, "digest")
    for world_size in (1, 2, 5):
        mine = Identity("qwen3", "0", "float32", loader, world_size)
        if (saver == 3) == (loader == 3):
            same = (saver, 2) == (loader, world_size)
            assert check_identity(tmp_path, mine).is_cut_as(mine) == same
        else:
            with pytest.raises(InvalidData, match=f"zero_stage is {saver}, expected {loader}"):
                check_identity(tmp_path, mine)


def test_a_checkpoint_without_optimizer_state_cannot_be_cut_anew(tmp_path: Path) -> None:
    saved = Identity("qwen3", "0", "float32", 1, 2)
    write_identity(tmp_path, saved, 0, "digest")
    assert check_identity(tmp_path, saved).steps_applied == 0
    with pytest.raises(InvalidData, match="no step was applied.*expected 2 ranks and ZeRO 1"):
        check_identity(tmp_path, replace(saved, world_size=1))


def test_a_checkpoint_that_says_nothing_of_a_value_head_or_digest_has_none(tmp_path: Path) -> None:
    mine = Identity("qwen3", "0", "float32", 1, 1)
    write_identity(tmp_path, mine, 3, "digest")
    path = tmp_path / "engine.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["value_head"], content["state_digest"]
    path.write_text(json.dumps(content), encoding="utf-8")
    assert check_identity(tmp_path, mine) == Saved(3, 1, 1, None)
    with pytest.raises(InvalidData, match="value_head is False, expected True"):
        check_identity(tmp_path, replace(mine, value_head=True))


def shards(directory: Path, names: list[str]) -> Path:
    for name in names:
        with zipfile.ZipFile(directory / f"{name}.pt", "w") as archive:
            archive.writestr("data", bytes(100))
    return directory


TWO = Saved(1, 3, 2, None)
OF_TWO = ["zero_0_optim_states", "zero_1_optim_states", "zero_0_model_states", "zero_1_model_states"]


def test_a_shard_that_is_missing_or_cut_short_is_named(tmp_path: Path) -> None:
    check_shards(shards(tmp_path, OF_TWO), TWO)
    with pytest.raises(InvalidData, match=r"has 2 files \*optim_states.pt, expected 3"):
        check_shards(tmp_path, replace(TWO, world_size=3))
    with pytest.raises(InvalidData, match=r"has 2 files \*model_states.pt, expected 1"):
        check_shards(tmp_path, replace(TWO, zero_stage=2))
    damaged = tmp_path / "zero_1_optim_states.pt"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    with pytest.raises(InvalidData, match="zero_1_optim_states.pt is damaged or cut short") as refused:
        check_shards(tmp_path, TWO)
    assert refused.value.code == "checkpoint_corrupt"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"steps_applied": "3"}', '{"steps_applied": 3, "zero_stage": 1}'])
def test_a_broken_identity_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "engine.json").write_text(content, encoding="utf-8")
    with pytest.raises(InvalidData) as refused:
        check_identity(tmp_path, Identity("qwen3", "0", "float32", 1, 1))
    assert refused.value.code == "checkpoint_incomplete"


def test_tokenizer_files_are_copied_and_weights_are_not(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    wanted = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "generation_config.json"}
    for name in wanted | {"config.json", "model.safetensors", "README.md"}:
        (source / name).write_text(name, encoding="utf-8")
    copy_tokenizer(source, target)
    assert {path.name for path in target.iterdir()} == wanted
    assert all((target / name).read_text(encoding="utf-8") == name for name in wanted)


def test_every_zero_option_that_is_taken_is_one_of_deepspeeds() -> None:
    """A name that DeepSpeed has dropped would be taken at load and end the trainer."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    assert known >= engines.ZERO_TAKEN
