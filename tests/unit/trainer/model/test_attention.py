from pathlib import Path

import pytest
import torch
import transformers.utils
from pydantic import ValidationError

from services.common.config import ModelConfig, ReferenceConfig
from services.common.errors import InvalidData
from services.trainer.batch.packing import pack
from services.trainer.model import attention
from services.trainer.model.load import FLASH, check_attention, read_model
from services.trainer.model.policy import load_policy
from services.trainer.update.reference import load_reference
from tests.support.trainer.model_families import make_model, make_samples

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_model("qwen3_moe").save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_takes_the_attention_that_is_configured(directory: str, attention: str) -> None:
    model = read_model(directory, dtype="float32", attention=attention)  # type: ignore[arg-type]
    assert model.config._attn_implementation == attention


def test_auto_is_what_transformers_picks(directory: str) -> None:
    native = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert read_model(directory, dtype="float32").config._attn_implementation == native.config._attn_implementation


def test_policy_and_critic_have_the_same_attention(directory: str) -> None:
    policy = load_policy(directory, dtype="float32", critic_path=directory, attention="eager")
    assert policy.critic is not None
    assert policy.critic.trunk.config._attn_implementation == "eager"
    assert policy.model.config._attn_implementation == "eager"


def test_the_probe_tells_what_packs_and_the_log_probs_stay_the_same(directory: str) -> None:
    eager, sdpa = (
        load_policy(directory, dtype="float32", keep_routing=False, attention=kind).eval() for kind in ("eager", "sdpa")
    )
    assert sdpa.facts.packs
    assert eager.facts.packs
    samples = make_samples([(4, 5), (6, 3)])
    with torch.no_grad():
        alone = torch.cat([sdpa(pack([one]), keep_routing=False)[0] for one in samples])
        for policy in (eager, sdpa):
            torch.testing.assert_close(policy(pack(samples), keep_routing=False)[0], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "device", "sentence"),
    [
        ("bfloat16", CPU, "on cpu, expected a CUDA device"),
        ("bfloat16", None, "on cpu, expected a CUDA device"),
        ("float32", GPU, "in float32, expected bfloat16"),
    ],
)
@pytest.mark.parametrize("attention", FLASH)
def test_flash_attention_is_refused_where_it_cannot_run(
    attention: str, dtype: str, device: torch.device | None, sentence: str
) -> None:
    with pytest.raises(InvalidData, match=f"{attention} {sentence}") as failure:
        check_attention(attention, dtype, device)  # type: ignore[arg-type]
    assert failure.value.code == "attention_unsupported"
    check_attention("sdpa", dtype, device)


def test_only_flash_attention_2_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: False)
    check_attention("varlen", "bfloat16", GPU)
    with pytest.raises(InvalidData, match="flash-attn is not installed"):
        check_attention("flash_attention_2", "bfloat16", GPU)
    monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: True)
    check_attention("flash_attention_2", "bfloat16", GPU)


def test_varlen_is_read_under_the_name_that_transformers_knows(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.model.load.check_attention", lambda *_: None)
    model = read_model(directory, dtype="bfloat16", attention="varlen", device=CPU)
    assert model.config._attn_implementation == attention.NAME


def test_a_model_is_read_only_after_its_attention_is_checked(directory: str) -> None:
    with pytest.raises(InvalidData, match="expected a CUDA device"):
        read_model(directory, dtype="bfloat16", attention="flash_attention_2", device=CPU)


def test_an_attention_that_the_model_lacks_is_named(tmp_path: Path) -> None:
    make_model("gpt_oss").save_pretrained(tmp_path)
    with pytest.raises(InvalidData, match="model.attention is sdpa, which gpt_oss cannot take") as failure:
        read_model(str(tmp_path), dtype="float32", attention="sdpa")
    assert failure.value.code == "attention_unsupported"


@pytest.mark.parametrize("attention", FLASH)
def test_the_configuration_refuses_flash_attention_in_float32(attention: str) -> None:
    with pytest.raises(ValidationError, match="flash attention computes in half precision only"):
        ModelConfig(path="m", dtype="float32", attention=attention)  # type: ignore[arg-type]
    assert ModelConfig(path="m", attention=attention).attention == attention  # type: ignore[arg-type]
    assert ModelConfig(path="m").attention == "auto"


def test_a_reference_on_the_cpu_leaves_flash_attention_to_the_policy(directory: str) -> None:
    model = ModelConfig(path=directory, dtype="bfloat16", attention="flash_attention_2")
    reference = load_reference(ReferenceConfig(device="cpu"), model, device=GPU)
    assert reference.facts.packs
    chosen = load_reference(ReferenceConfig(), model.model_copy(update={"attention": "eager"}), device=CPU)
    assert chosen._policy.model.config._attn_implementation == "eager"
