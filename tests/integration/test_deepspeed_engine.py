"""Real DeepSpeed on CPU, alone and on two ranks, against plain PyTorch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.trainer.batch.packing import pack
from services.trainer.model.policy import load_policy
from services.trainer.update.policy_update import PolicyUpdater
from tests.integration import deepspeed_worker as worker
from tests.support.trainer import deepspeed_ranks as ranks
from tests.support.trainer.plain_engine import DescentEngine

# The first test waits for both runs of the worker.
pytestmark = pytest.mark.timeout(600)

CASES = [(world_size, *case) for world_size, cases in worker.CASES.items() for case in cases]
FLOAT32 = [case for case in CASES if case[2] == "float32"]
RECUT = [(world_size, *case) for world_size, cases in worker.RECUT.items() for case in cases]
NOT_FINITE_CASES = [(world_size, *case) for world_size, cases in worker.NOT_FINITE_CASES.items() for case in cases]
PPO_CASES = [(world_size, *case) for world_size, cases in worker.PPO_CASES.items() for case in cases]


@pytest.fixture(scope="module")
def directory(ranks: Path) -> Path:
    return ranks / "engine"


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[int, dict[str, Any]]:
    def read(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
        return found

    return {
        world_size: {**read(f"results-{world_size}"), "recut": read(f"recut-{world_size}")} for world_size in (1, 2)
    }


def result_of(results: dict[int, dict[str, Any]], case: tuple[int, int, str]) -> dict[str, Any]:
    world_size, stage, dtype = case
    found: dict[str, Any] = results[world_size]["cases"][f"{stage}-{dtype}"]
    return found


@pytest.fixture(scope="module")
def plain(directory: Path) -> tuple[dict[str, Tensor], list[float]]:
    """The worker's two steps in one batch of plain PyTorch: parameters and gradient norms."""
    policy = load_policy(str(directory / "model"), dtype="float32")
    parameters = dict(policy.model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": ranks.WEIGHT_DECAY},
            {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    norms = []
    batch = pack(ranks.samples())
    for step in range(2):
        for group in optimizer.param_groups:
            group["lr"] = ranks.LEARNING_RATE * (step + 1) / ranks.WARMUP
        logprobs, _ = policy(batch)
        loss = -(logprobs * batch.advantages[batch.sequence_ids]).mean()
        optimizer.zero_grad()
        loss.backward()
        policy.close_routing()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), ranks.MAX_GRAD_NORM)))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}, norms


@pytest.mark.parametrize("case", FLOAT32, ids=str)
def test_two_steps_are_those_of_plain_pytorch(
    directory: Path,
    results: dict[int, dict[str, Any]],
    plain: tuple[dict[str, Tensor], list[float]],
    case: tuple[int, int, str],
) -> None:
    expected, norms = plain
    result = result_of(results, case)
    assert result["applied"] == [True, True]
    assert result["moved"]
    assert result["grad_norms"] == pytest.approx(norms, rel=1e-4)
    trained = load_file(directory / f"trained-{'-'.join(map(str, case))}.safetensors")
    assert trained.keys() == expected.keys()
    for name, parameter in expected.items():
        # Adam divides by the gradient's own size, so where that is rounding noise the step's sign is too.
        gap = (trained[name] - parameter).abs()
        assert float(gap.quantile(0.99)) < 1e-5, name
        assert float(gap.mean()) < 1e-5, name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(
    results: dict[int, dict[str, Any]], case: tuple[int, int, str]
) -> None:
    result = result_of(results, case)
    assert not result["skip_applied"]
    assert not result["skip_norm_finite"]
    assert result["skip_unchanged"]


@pytest.mark.parametrize("case", NOT_FINITE_CASES, ids=str)
def test_a_number_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    results: dict[int, dict[str, Any]], case: tuple[int, int, str]
) -> None:
    world_size, stage, dtype = case
    result = results[world_size]["not_finite"][f"{stage}-{dtype}"]
    for reported in result["reported"].values():
        assert (reported["applied"], reported["reason"], reported["unchanged"]) == (0, "forward", True)
        assert 0 < len(reported["samples"]) < len(ranks.LENGTHS)
    assert result["applied"] == [1, 1]
    assert result["finite_on_every_rank"] == [1, 1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_resume_is_bit_exact(results: dict[int, dict[str, Any]], case: tuple[int, int, str]) -> None:
    result = result_of(results, case)
    assert result["resume_equal"]
    assert result["random_state_restored"]
    assert result["digests_resumed"]
    assert results[case[0]]["good_on_every_rank"] == [1.0] * len(worker.CASES[case[0]])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_export_loads_in_transformers_with_equal_log_probs(
    directory: Path, results: dict[int, dict[str, Any]], case: tuple[int, int, str]
) -> None:
    world_size, stage, dtype = case
    exported = directory / f"export-{world_size}-{stage}-{dtype}"
    policy = load_policy(str(exported), dtype=dtype)  # type: ignore[arg-type]
    with torch.no_grad():
        logprobs, _ = policy(pack(ranks.samples()[:2]))
    expected = torch.tensor(result_of(results, case)["exported_logprobs"])
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    assert (exported / "tokenizer_config.json").read_bytes() == (
        directory / "model" / "tokenizer_config.json"
    ).read_bytes()
    stored = load_file(exported / "model.safetensors")
    assert {str(tensor.dtype) for tensor in stored.values()} == {f"torch.{dtype}"}
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in stored


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_engine_reports_what_it_does(results: dict[int, dict[str, Any]], case: tuple[int, int, str]) -> None:
    result = result_of(results, case)
    half, full = ranks.LEARNING_RATE / 2, ranks.LEARNING_RATE
    assert result["learning_rates"] == pytest.approx([half, full, full, full])
    rows, *agreeing = result["agreement"]
    assert rows == sum(sample.forward_length for sample in ranks.samples()[:2])
    assert all(0 <= count < rows for count in agreeing)
    assert result["rotary_dtypes"] == ["torch.float32"]
    assert result["sharded"] == (case[1] == 3)


def ppo_result(results: dict[int, dict[str, Any]], case: tuple[int, int, str]) -> dict[str, Any]:
    world_size, stage, dtype = case
    found: dict[str, Any] = results[world_size]["ppo"][f"{stage}-{dtype}"]
    return found


@pytest.mark.parametrize("case", PPO_CASES, ids=str)
def test_ppo_trains_the_value_head_with_the_policy(
    directory: Path, results: dict[int, dict[str, Any]], case: tuple[int, int, str]
) -> None:
    result = ppo_result(results, case)
    first, second = result["steps"]
    assert result["start"] == [0.0] * len(result["start"])
    assert (first["value"], second["value"]) == (0.0, pytest.approx(second["value"]))
    assert second["value"] != 0
    assert min(map(abs, result["values"])) > 0
    if case[2] != "float32":
        return
    # On one rank in plain PyTorch, packed differently.
    config = ranks.configuration(directory / "model", case[1], "float32", algorithm=worker.PPO)
    engine = DescentEngine(load_policy(str(directory / "model"), dtype="float32", value_head=True))
    expected = PolicyUpdater(config, engine, None).train(ranks.rewarded_samples())
    same = ["loss", "policy_loss", "value_loss", "entropy_loss", "grad_norm", "return", "policy_ratio", "entropy"]
    assert {name: first[name] for name in same} == pytest.approx({name: expected[name] for name in same}, rel=1e-4)
    other = ppo_result(results, (1, 1, "float32"))["steps"][1]
    assert {name: second[name] for name in same} == pytest.approx({name: other[name] for name in same}, rel=1e-3)


@pytest.mark.parametrize("case", PPO_CASES, ids=str)
def test_ppo_resumes_bit_exactly_head_included(results: dict[int, dict[str, Any]], case: tuple[int, int, str]) -> None:
    assert ppo_result(results, case)["resume_equal"]


@pytest.mark.parametrize("case", PPO_CASES, ids=str)
def test_an_export_leaves_the_value_head_out(
    directory: Path, results: dict[int, dict[str, Any]], case: tuple[int, int, str]
) -> None:
    exported = directory / f"export-ppo-{'-'.join(map(str, case))}"
    assert load_file(exported / "model.safetensors").keys() == load_file(directory / "model/model.safetensors").keys()
    _, loading = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(loading.values())
    policy = load_policy(str(exported), dtype=case[2])  # type: ignore[arg-type]
    with torch.no_grad():
        logprobs, _ = policy(pack(ranks.rewarded_samples()[:2]))
    expected = torch.tensor(ppo_result(results, case)["exported_logprobs"])
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


def test_checkpoints_without_a_value_head_are_refused_by_ppo(results: dict[int, dict[str, Any]]) -> None:
    for case in PPO_CASES:
        assert "value_head is False, expected True" in ppo_result(results, case)["without_head"]


def test_a_separate_critic_trains_and_resumes_under_zero_3_with_two_ranks(
    directory: Path, results: dict[int, dict[str, Any]]
) -> None:
    result = results[2]["critic"]
    first, second = result["steps"]
    model = str(directory / "model")
    config = ranks.configuration(directory / "model", 3, "float32", algorithm=worker.CRITIC)
    engine = DescentEngine(load_policy(model, dtype="float32", critic_path=model))
    expected = PolicyUpdater(config, engine, None).train(ranks.rewarded_samples())
    same = ["loss", "policy_loss", "value_loss", "entropy_loss", "grad_norm", "return", "policy_ratio", "entropy"]
    assert {name: first[name] for name in same} == pytest.approx({name: expected[name] for name in same}, rel=1e-4)
    assert second["value"] != 0
    assert result["resume_equal"]
    policy_rate, critic_rate = result["rates"]
    assert critic_rate == pytest.approx(3 * policy_rate)
    assert "value_head is True, expected False" in result["shared"]
    exported = load_file(directory / "export-critic-2" / "model.safetensors")
    assert exported.keys() == load_file(directory / "model/model.safetensors").keys()


def whole_state(directory: Path, name: str) -> dict[str, Tensor]:
    """Every parameter's values and optimizer state, flat, from the parts that the ranks wrote."""
    parts: dict[str, dict[int, Tensor]] = {}
    for path in sorted(directory.glob(f"{name}-[0-9].safetensors")):
        for key, values in load_file(path).items():
            entry, _, start = key.rpartition("|")
            parts.setdefault(entry, {})[int(start)] = values.flatten()
    return {entry: torch.cat([found[start] for start in sorted(found)]) for entry, found in parts.items()}


@pytest.mark.parametrize("case", RECUT, ids=str)
def test_another_number_of_ranks_takes_up_the_very_same_state(
    directory: Path, results: dict[int, dict[str, Any]], case: tuple[int, str, int, str]
) -> None:
    world_size, name, _, _ = case
    saved, loaded = whole_state(directory, f"state-{name}"), whole_state(directory, f"recut-state-{name}")
    assert saved.keys() == loaded.keys()
    assert {entry.rpartition("|")[2] for entry in saved} == {"fp32", "exp_avg", "exp_avg_sq", "step"}
    assert any("value_head" in entry for entry in saved) == name.startswith("ppo")
    for entry, values in saved.items():
        assert torch.equal(loaded[entry], values), entry
    assert results[world_size]["recut"][name]["steps_applied"] == 2
    assert (directory / name / "universal").is_dir()
    assert not list((directory / name).glob("converting-*"))


@pytest.mark.parametrize("case", RECUT, ids=str)
def test_another_number_of_ranks_goes_on_as_the_first_would(
    directory: Path, results: dict[int, dict[str, Any]], case: tuple[int, str, int, str]
) -> None:
    """Ranks add up gradients in another order, so equality ends at rounding, which in bf16 is that of activations."""
    world_size, name, _, dtype = case
    kind, saver, rest = name.split("-", 2)
    expected = results[int(saver)]["ppo" if kind == "ppo" else "cases"][rest]["next"]
    exact = dtype == "float32"
    assert results[world_size]["recut"][name]["next"] == pytest.approx(expected, rel=1e-4 if exact else 1e-2, abs=1e-6)
    straight, resumed = whole_state(directory, f"next-{name}"), whole_state(directory, f"recut-next-{name}")
    for entry, values in straight.items():
        gap = float((resumed[entry] - values).abs().max())
        if entry.endswith("|step"):
            assert gap == 0, entry
        else:
            assert gap <= (2e-6 if exact else ranks.LEARNING_RATE), entry


def test_a_rank_without_a_saved_random_state_draws_for_itself(results: dict[int, dict[str, Any]]) -> None:
    ((name, found),) = results[2]["recut"].items()
    kept, derived = found["drawn_by_rank"]
    assert kept == results[1]["cases"][name.split("-", 2)[2]]["drawn"]
    assert derived != kept


def test_checkpoints_of_something_else_are_refused_by_name(results: dict[int, dict[str, Any]]) -> None:
    said = {**results[1]["refusals"], **results[2]["refusals"]}
    assert said.pop("missing").startswith("checkpoint_incomplete: ")
    for damage in ("cut_short", "overwritten", "gone"):
        sentence = said.pop(damage)
        assert sentence.startswith("checkpoint_corrupt: ")
        assert f"damaged-{damage}/deepspeed" in sentence
    assert said.keys() == {"parameters", "zero_stage", "value_head", "dtype"}
    for different, sentence in said.items():
        assert sentence.startswith("checkpoint_mismatch: ")
        assert f"{different} is " in sentence
        assert ", expected " in sentence


def test_collectives(results: dict[int, dict[str, Any]]) -> None:
    for world_size, reduced in {
        1: {"sum": [1.5, 0.0], "min": [1.5, 0.0], "max": [1.5, 0.0]},
        2: {"sum": [3.0, 1.0], "min": [1.5, 0.0], "max": [1.5, 1.0]},
    }.items():
        found = results[world_size]["collectives"]
        assert found["broadcast"]
        assert found["input_kept"]
        assert found["reduced"] == reduced
        assert "only rank 0 passes data" in found["one_sided"]
