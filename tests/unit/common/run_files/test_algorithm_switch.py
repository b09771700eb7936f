import pytest

from services.common.config import AlgorithmConfig, ConfigError, load_config, overrides_by_algorithm, parse_config
from services.common.run_files.algorithm_switch import OWN_SETTINGS, algorithm_overrides

TREE = {
    "run": {"name": "switch"},
    "model": {"path": "models/none", "max_length": 2048},
    "data": {"train": {"kind": "jsonl", "path": "none.jsonl"}},
    "reward": {"scorers": [{"name": "exact_match"}]},
    "algorithm": {
        "name": "ppo",
        "clip_low": 0.1,
        "aggregation": "token_mean",
        "critic": "separate",
        "critic_path": "models/critic",
        "value_coef": 0.3,
        "gamma": 0.9,
        "mask_truncated": True,
        "advantage_normalization": "std",
    },
}


def test_what_belongs_to_another_algorithm_is_dropped_and_what_all_share_stays(tmp_path):
    config = parse_config(TREE)
    file = tmp_path / "run.yaml"
    file.write_text(str(TREE))
    switched = load_config(file, algorithm_overrides(config, "gspo"), environment={}).algorithm
    assert switched.name == "gspo"
    for setting in OWN_SETTINGS:
        assert getattr(switched, setting) == AlgorithmConfig.model_fields[setting].default, setting
    assert (switched.gamma, switched.mask_truncated, switched.advantage_normalization) == (0.9, True, "std")


def test_the_configured_algorithm_keeps_what_is_set_for_it():
    assert algorithm_overrides(parse_config(TREE), "ppo") == []


def test_overrides_name_their_algorithm():
    found = overrides_by_algorithm(
        ["gspo:trainer.steps=3", "my.module:make:run.seed=2", "gspo:model.path=hub:model"], ["gspo", "my.module:make"]
    )
    assert found == {"gspo": ["trainer.steps=3", "model.path=hub:model"], "my.module:make": ["run.seed=2"]}


@pytest.mark.parametrize(
    ("override", "reported"),
    [
        ("trainer.steps=3", "expected algorithm:section.key=value"),
        ("gspo:trainer.steps", "expected algorithm:section.key=value"),
        ("grpo:trainer.steps=3", r"grpo is not among the algorithms \(gspo\)"),
    ],
)
def test_overrides_that_name_none_are_refused(override, reported):
    with pytest.raises(ConfigError, match=reported):
        overrides_by_algorithm([override], ["gspo"])
