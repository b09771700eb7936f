import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.export import policy_files
from services.trainer.export.policy_files import separate_tensors, stream_model, write_model
from tests.support.trainer.model_families import FAMILIES, make_model


@pytest.mark.parametrize("family", FAMILIES)
def test_one_file_is_the_one_that_a_whole_model_gives(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    write_model(model, model.state_dict(), tmp_path / "whole")
    source = separate_tensors(model, None)
    assert source is not None
    stream_model(model, source, tmp_path / "streamed")
    written = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert written == {path.name: path.read_bytes() for path in (tmp_path / "streamed").iterdir()}
    assert (tmp_path / "streamed" / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_several_files_hold_a_bounded_part_each_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3_moe")
    source = separate_tensors(model, None)
    assert source is not None
    held: list[int] = []
    save = policy_files.save_file
    monkeypatch.setattr(
        policy_files,
        "save_file",
        lambda tensors, path, metadata: (
            held.append(sum(tensor.nbytes for tensor in tensors.values())),
            save(tensors, path, metadata),
        ),
    )
    stream_model(model, source, tmp_path, file_bytes=20_000)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == [f"model-{number:05}-of-{len(held):05}.safetensors" for number in range(1, len(held) + 1)]
    assert len(held) > 5
    assert max(held) <= 20_000
    assert sum(held) == source.total_bytes
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert set(index["weight_map"]) == {tensor.name for tensor in source.tensors}
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    parameters = dict(loaded.named_parameters())
    assert all(torch.equal(parameters[name], parameter) for name, parameter in model.named_parameters())


def test_a_tensor_larger_than_a_file_has_one_of_its_own(tmp_path: Path) -> None:
    model = make_model("qwen3")
    source = separate_tensors(model, None)
    assert source is not None
    stream_model(model, source, tmp_path, file_bytes=1)
    assert len(list(tmp_path.glob("*.safetensors"))) == len(source.tensors)


def test_a_model_that_leaves_tensors_out_is_written_whole() -> None:
    model = make_model("qwen3")
    model._keys_to_ignore_on_save = {"lm_head.weight"}
    assert separate_tensors(model, None) is None
