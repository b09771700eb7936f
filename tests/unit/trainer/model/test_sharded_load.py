"""Reading and probing a model that is sharded while it is read, with the parts kept in this process."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from services.common.config import ModelConfig, ReferenceConfig
from services.common.errors import InvalidData
from services.trainer.model.gathering import gathered_by_layer
from services.trainer.model.load import read_model
from services.trainer.model.policy import Policy, load_policy
from services.trainer.model.sharded_load import StoredTensor, read_sharded, stored_tensors
from services.trainer.model.sharding import whole_shape
from services.trainer.update.reference import load_reference
from tests.support.trainer.model_families import FAMILIES, make_model

CPU = torch.device("cpu")


class KeptAside:
    """Leaves nothing in a parameter, as ZeRO-3 does, and counts what is whole at a time."""

    def __init__(self, *, reads: bool = True) -> None:
        self.reads = reads
        self.kept: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self.bytes_whole = self.most_bytes_whole = 0
        self.served: list[nn.Module] = []

    def is_sharded(self, parameter: Tensor) -> bool:
        return id(parameter) in self.kept

    def shard(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        for parameter in parameters:
            if not self.is_sharded(parameter):
                parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
                values = parameter.detach().to(dtype) if parameter.is_floating_point() else parameter.detach()
                self.kept[id(parameter)] = (parameter, values.clone())
                parameter.data = torch.empty(0, dtype=values.dtype)

    @contextmanager
    def whole(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        chosen = list({id(parameter): parameter for parameter in parameters}.values())
        for parameter in chosen:
            assert not parameter.numel()
            parameter.data = self.kept[id(parameter)][1].clone()
        size = sum(parameter.nbytes for parameter in chosen)
        self.bytes_whole += size
        self.most_bytes_whole = max(self.most_bytes_whole, self.bytes_whole)
        yield
        self.bytes_whole -= size
        for parameter in chosen:
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    def share(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(tensor.clone())

    def inference(self, module: nn.Module) -> nn.Module:
        self.served.append(module)
        return module

    def values(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: self.kept[id(parameter)][1] for name, parameter in model.named_parameters()}


def saved(directory: Path, family: str, **overrides: Any) -> Path:
    make_model(family, **overrides).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_cut_while_read_is_what_a_plain_load_gives(family: str, tmp_path: Path) -> None:
    directory = saved(tmp_path, family)
    sharding = KeptAside()
    policy = load_policy(str(directory), dtype="float32", keep_routing=False, device=CPU, sharding=sharding)
    plain = load_policy(str(directory), dtype="float32", keep_routing=False)
    found, expected = sharding.values(policy), dict(plain.named_parameters())
    assert found.keys() == expected.keys()
    assert {name: (tensor.dtype, whole_shape(tensor)) for name, tensor in policy.named_parameters()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in expected.items()
    }
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    buffers = dict(policy.named_buffers())
    assert buffers.keys() == dict(plain.named_buffers()).keys()
    for name, buffer in plain.named_buffers():
        assert (buffers[name].dtype, buffers[name].device) == (buffer.dtype, CPU)
        assert torch.equal(buffers[name], buffer), name
    assert policy.facts == plain.facts
    assert policy.training
    assert sharding.bytes_whole == 0


def test_probing_holds_one_layer_at_a_time(tmp_path: Path) -> None:
    directory = saved(tmp_path, "qwen3_moe", num_hidden_layers=8)
    sharding = KeptAside()
    policy = load_policy(str(directory), dtype="float32", device=CPU, sharding=sharding)
    sizes = {id(parameter): values.nbytes for parameter, values in sharding.kept.values()}
    layers = [sum(sizes[id(p)] for p in layer.parameters()) for layer in policy.model.base_model.layers]
    assert sharding.most_bytes_whole == max(layers)


def test_a_rank_that_does_not_read_goes_through_the_same_steps_with_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = saved(tmp_path, "deepseek_v3")
    config = make_model("deepseek_v3").config
    order: dict[bool, list[tuple[int, ...]]] = {}
    for reads in (True, False):
        sharding = KeptAside(reads=reads)
        if not reads:
            monkeypatch.setattr(StoredTensor, "_values", lambda _: pytest.fail("read weights"))
        read_sharded(directory, config, torch.float32, sharding)
        order[reads] = [tuple(values.shape) for _, values in sharding.kept.values()]
    assert order[True] == order[False]


def test_what_is_stored_comes_one_tensor_at_a_time_and_as_it_is(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1], dtype=torch.int32)}, tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path, reads=True, dtype=torch.bfloat16)
    assert torch.equal(stored["a"][...], torch.arange(6.0).reshape(2, 3))
    assert stored["b"][...].dtype == torch.int32
    shapes = stored_tensors(tmp_path, reads=False, dtype=torch.bfloat16)
    assert shapes["a"][...].shape == (2, 3)
    assert shapes["a"][...].untyped_storage().nbytes() == 2


def test_shards_on_disk_are_read_by_their_index(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    sharding = KeptAside()
    sharded = read_model(str(tmp_path), dtype="float32", device=CPU, sharding=sharding)
    expected = dict(model.named_parameters())
    assert all(torch.equal(values, expected[name]) for name, values in sharding.values(sharded).items())


@pytest.mark.parametrize("content", [None, "{", '{"weight_map": []}'])
def test_weights_that_are_no_safetensors_are_refused(content: str | None, tmp_path: Path) -> None:
    saved(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    if content is not None:
        (tmp_path / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    with pytest.raises(InvalidData, match="ZeRO-3 reads its weights from safetensors") as refused:
        load_policy(str(tmp_path), dtype="float32", device=CPU, sharding=KeptAside())
    assert refused.value.code == "weights_missing"


@pytest.mark.parametrize("equal", [True, False])
def test_an_output_matrix_that_is_to_be_tied_must_be_the_embedding(equal: bool, tmp_path: Path) -> None:
    saved(tmp_path, "qwen3_moe")
    weights = load_file(tmp_path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.clone() if equal else embedding + 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    sharding = KeptAside()
    if equal:
        model = read_model(str(tmp_path), dtype="float32", device=CPU, sharding=sharding)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return
    with pytest.raises(InvalidData, match="tie_word_embeddings false") as refused:
        read_model(str(tmp_path), dtype="float32", device=CPU, sharding=sharding)
    assert refused.value.code == "weights_ambiguous"


def test_what_the_file_does_not_have_is_cut_too(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3", tie_word_embeddings=False)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    sharding = KeptAside()
    model = read_model(str(tmp_path), dtype="bfloat16", device=CPU, sharding=sharding)
    assert all(sharding.is_sharded(parameter) for parameter in model.parameters())
    assert {values.dtype for values in sharding.values(model).values()} == {torch.bfloat16}
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_a_refusal_of_the_probe_is_the_same(tmp_path: Path) -> None:
    directory = saved(tmp_path, "deepseek_v2", topk_method="group_limited_greedy")
    said = []
    for sharding in (None, KeptAside()):
        with pytest.raises(InvalidData) as refused:
            load_policy(str(directory), dtype="float32", device=CPU, sharding=sharding)
        said.append((refused.value.code, str(refused.value)))
    assert said[0] == said[1]
    assert said[0][0] == "router_unsupported"


def test_value_heads_and_critics_are_cut_with_the_rest(tmp_path: Path) -> None:
    directory = str(saved(tmp_path, "qwen3_moe"))
    for extra in ({"value_head": True}, {"critic_path": directory}):
        sharding = KeptAside()
        policy = load_policy(directory, dtype="bfloat16", device=CPU, sharding=sharding, **extra)  # type: ignore[arg-type]
        assert all(sharding.is_sharded(parameter) for parameter in policy.parameters())
        heads = {name: values for name, values in sharding.values(policy).items() if "value_head" in name}
        assert {tuple(values.shape) for values in heads.values()} == {(1, 32), (1,)}
        assert not any(values.any() for values in heads.values())
        plain = load_policy(directory, dtype="bfloat16", **extra)  # type: ignore[arg-type]
        assert policy.facts == plain.facts


def test_a_reference_is_sharded_unless_it_is_int8_or_stays_on_the_cpu_beside_gpus(tmp_path: Path) -> None:
    model = ModelConfig(path=str(saved(tmp_path, "qwen3_moe")), dtype="float32")
    for reference, device, shards in (
        (ReferenceConfig(), CPU, True),
        (ReferenceConfig(dtype="bfloat16"), CPU, True),
        (ReferenceConfig(device="cpu"), CPU, True),
        (ReferenceConfig(dtype="int8"), CPU, False),
        (ReferenceConfig(device="cpu"), torch.device("cuda"), False),
    ):
        sharding = KeptAside()
        loaded = load_reference(reference, model, device=device, sharding=sharding)
        assert loaded.facts.model_type == "qwen3_moe"
        assert bool(sharding.served) is bool(sharding.kept) is shards
        assert not any(parameter.requires_grad for parameter, _ in sharding.kept.values())
        wanted = {"bfloat16": torch.bfloat16}.get(reference.dtype or "", torch.float32)
        assert {values.dtype for _, values in sharding.kept.values()} <= {wanted}


class Layer(nn.Module):
    """Saves views of its parameters for backward, and reads a child's weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 8, 8))
        self.child = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = hidden @ self.experts[1].t() + hidden @ self.experts.transpose(1, 2)[2]
        return torch.tanh(mixed) @ self.child.weight + self.child(hidden)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.norm = nn.LayerNorm(8)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        normed: Tensor = self.norm(hidden)
        return normed


def test_gradients_through_gathered_layers_are_those_of_the_whole_model() -> None:
    torch.manual_seed(5)
    model, inputs = Stack(), torch.randn(4, 8, requires_grad=True)

    def gradient() -> Tensor:
        (found,) = torch.autograd.grad((model(inputs) * torch.arange(8.0)).sum(), inputs)
        return found

    expected = gradient()
    sharding = KeptAside()
    sharding.shard(model.parameters(), torch.float32)
    with gathered_by_layer(model, sharding):
        assert torch.equal(gradient(), expected)
        assert torch.equal(gradient(), expected)
    assert all(not parameter.numel() for parameter in model.parameters())


def test_a_forward_that_fails_leaves_nothing_gathered() -> None:
    model = Stack()
    sharding = KeptAside()
    sharding.shard(model.parameters(), torch.float32)
    with gathered_by_layer(model, sharding), pytest.raises(RuntimeError, match="size of tensor"):
        model(torch.randn(4, 3))
    assert sharding.bytes_whole == 0
    assert all(not parameter.numel() for parameter in model.parameters())


def test_nothing_changes_for_a_model_that_is_whole() -> None:
    model = Policy(make_model("qwen3_moe"))
    with gathered_by_layer(model, None):
        assert all(whole_shape(parameter) == parameter.shape for parameter in model.parameters())
