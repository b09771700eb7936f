"""The quickstart's model, data and warm-up, at sizes that take seconds."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from examples.quickstart.__main__ import Report, Sizes, build, main
from examples.quickstart.evaluate import GREEDY, Sampling, accuracy, complete, directory_accuracy
from examples.quickstart.model import build_model
from examples.quickstart.task import DIGITS, Problem, draw_problem, draw_split, imperfect_answer, read_jsonl
from examples.quickstart.tokenizer import END, PAD, SPECIAL_TOKENS, build_tokenizer, chat_prompts
from examples.quickstart.warmup import IGNORED, WarmupSettings, _completion_loss, _demonstrations, warm_up
from services.common.config import load_config

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = WarmupSettings(batch_size=8, ramp_steps=1, check_every=2, most_steps=3)
SIZES = Sizes(train=24, validation=12, probe=8)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Report]:
    directory = tmp_path_factory.mktemp("quickstart") / "model"
    return directory, build(directory, 1, SETTINGS, sizes=SIZES)


@pytest.mark.parametrize("text", ["sort 31415", "  héllo\n\twörld  ", "日本語 🙂", "", "\x00\x7f"])
def test_tokenizer_round_trip_is_one_token_per_byte(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_every_token_id_is_used(tokenizer):
    assert len(tokenizer) == 256 + len(SPECIAL_TOKENS)
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))


def test_chat_template_marks_every_turn(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "sort 21"},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "sort 43"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>Be brief.<|end|><|user|>sort 21<|end|><|assistant|>12<|end|><|user|>sort 43<|end|><|assistant|>"
    )


def test_chat_template_refuses_an_unknown_role(tokenizer):
    with pytest.raises(Exception, match="role is tool, expected system, user or assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_prompts_and_answers_fit_the_configuration(tokenizer):
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    problem = draw_problem(np.random.default_rng(0))
    (prompt,) = chat_prompts(tokenizer, [problem.prompt])
    assert len(prompt) <= config.data.max_prompt_tokens
    assert len(tokenizer.encode(problem.answer)) + 1 <= config.sampling.max_tokens
    sampling = Sampling()
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (
        config.sampling.temperature,
        config.sampling.top_k,
        config.sampling.top_p,
        config.sampling.max_tokens,
    )


def test_splits_share_no_prompt():
    rng = np.random.default_rng(0)
    # Two digits give 100 prompts, so that collisions do occur.
    first = draw_split(rng, "validation", 40, length=2)
    taken = {problem.prompt for problem in first}
    second = draw_split(rng, "train", 30, taken, length=2)
    prompts = [problem.prompt for problem in first + second]
    assert len(set(prompts)) == 70
    assert len({problem.id for problem in first + second}) == 70


def test_split_that_asks_too_much_is_refused():
    with pytest.raises(ValueError, match="count is 51, expected at most 50"):
        draw_split(np.random.default_rng(0), "train", 51, length=2)


def test_answers_are_the_sorted_digits():
    for problem in draw_split(np.random.default_rng(0), "train", 50):
        digits = problem.prompt.removeprefix("sort ")
        assert problem.answer == "".join(sorted(digits))


def test_imperfect_answers_err_as_often_as_asked():
    rng = np.random.default_rng(0)
    assert imperfect_answer("1123", rng, forget_rate=0.0, typo_rate=0.0) == "1123"
    assert imperfect_answer("1123", rng, forget_rate=1.0, typo_rate=0.0) == "123"
    assert imperfect_answer("0123", rng, forget_rate=1.0, typo_rate=0.0) == "0123"
    typos = [imperfect_answer("1123", rng, forget_rate=0.0, typo_rate=1.0) for _ in range(50)]
    assert all(sum(a != b for a, b in zip(typo, "1123", strict=True)) == 1 for typo in typos)
    assert all(set(typo) <= set(DIGITS) for typo in typos)
    right = sum(imperfect_answer("0123", rng, forget_rate=0.5, typo_rate=0.3) == "0123" for _ in range(2000))
    assert right / 2000 == pytest.approx(0.7, abs=0.04)


def test_demonstrations_teach_completion_and_end_only(tokenizer):
    rng = np.random.default_rng(0)
    settings = WarmupSettings(batch_size=16, forget_rate=0.5, typo_rate=0.0)
    token_ids, labels = _demonstrations(rng, tokenizer, settings, frozenset())
    for row, label in zip(token_ids, labels, strict=True):
        text = tokenizer.decode(row[row != tokenizer.pad_token_id])
        prompt, completion = text.split("<|assistant|>")
        assert prompt.startswith("<|user|>sort ")
        assert tokenizer.decode(label[label != IGNORED]) == completion
        assert completion.endswith(END)
        (rendered,) = chat_prompts(tokenizer, [prompt.removeprefix("<|user|>").removesuffix(END)])
        assert row[: len(rendered)].tolist() == rendered
    assert len({int((label != IGNORED).sum()) for label in labels}) > 1


def test_demonstrations_skip_held_out_prompts(tokenizer):
    settings = WarmupSettings(batch_size=32)
    token_ids, _ = _demonstrations(np.random.default_rng(0), tokenizer, settings, frozenset())
    seen = {tokenizer.decode(row).split(">", 1)[1].split(END)[0] for row in token_ids}
    held_out = frozenset(sorted(seen)[:16])
    token_ids, _ = _demonstrations(np.random.default_rng(0), tokenizer, settings, held_out)
    seen_now = {tokenizer.decode(row).split(">", 1)[1].split(END)[0] for row in token_ids}
    assert not seen_now & held_out
    assert seen_now & seen


def test_loss_is_unchanged_by_padding_and_equals_the_models_own(tokenizer):
    model = build_model(tokenizer, 0, max_length=64)
    settings = WarmupSettings(batch_size=8, forget_rate=0.5, typo_rate=0.0)
    token_ids, labels = _demonstrations(np.random.default_rng(0), tokenizer, settings, frozenset())
    loss = _completion_loss(model, token_ids, labels)
    own = model(input_ids=token_ids, labels=labels).loss
    torch.testing.assert_close(loss, own, rtol=1e-5, atol=1e-6)
    wider = torch.nn.functional.pad(token_ids, (0, 5), value=tokenizer.pad_token_id)
    padded = _completion_loss(model, wider, torch.nn.functional.pad(labels, (0, 5), value=IGNORED))
    torch.testing.assert_close(padded, loss, rtol=1e-5, atol=1e-6)


def test_warm_up_lowers_the_loss_and_ends_at_its_bound(tokenizer):
    settings = WarmupSettings(batch_size=16, ramp_steps=5, check_every=100, most_steps=25, target_accuracy=0.99)
    losses = []
    for most_steps in (1, 25):
        model = build_model(tokenizer, 0, max_length=64)
        result = warm_up(
            model,
            tokenizer,
            draw_split(np.random.default_rng(0), "train", 4),
            held_out=frozenset(),
            seed=0,
            settings=replace(settings, most_steps=most_steps),
            sampling=Sampling(),
        )
        assert result.steps == most_steps
        losses.append(result.loss)
    assert losses[1] < losses[0] - 2


def test_warm_up_ends_at_its_target(tokenizer):
    result = warm_up(
        build_model(tokenizer, 0, max_length=64),
        tokenizer,
        draw_split(np.random.default_rng(0), "train", 4),
        held_out=frozenset(),
        seed=0,
        settings=WarmupSettings(batch_size=4, least_steps=3, check_every=2, most_steps=9, target_accuracy=0.0),
        sampling=Sampling(),
    )
    assert result.steps == 4


def test_accuracy_counts_exact_matches(tokenizer):
    model = build_model(tokenizer, 0, max_length=64)
    prompts = [problem.prompt for problem in draw_split(np.random.default_rng(0), "train", 5)]
    texts = complete(model, tokenizer, prompts, GREEDY, 0)
    problems = [
        Problem(str(index), prompt, text if index < 2 else text + "x")
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    assert accuracy(model, tokenizer, problems, GREEDY) == pytest.approx(2 / 5)


def test_batched_completions_equal_single_ones(tokenizer):
    model = build_model(tokenizer, 0, max_length=64)
    prompts = ["sort 31415", "sort 1", "a longer prompt"]
    together = complete(model, tokenizer, prompts, GREEDY, 0)
    assert together == [complete(model, tokenizer, [prompt], GREEDY, 0)[0] for prompt in prompts]


def test_sampling_is_seeded_and_leaves_the_global_state(tokenizer):
    model = build_model(tokenizer, 0, max_length=64)
    before = torch.get_rng_state()
    texts = [complete(model, tokenizer, ["sort 31415"] * 4, Sampling(), seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_directory_loads_in_transformers(built, tokenizer):
    directory, report = built
    model = AutoModelForCausalLM.from_pretrained(directory)
    loaded = AutoTokenizer.from_pretrained(directory)
    assert model.config.model_type == "qwen3_moe"
    assert model.config.vocab_size == len(loaded) == len(tokenizer)
    assert model.num_parameters() == report.parameters
    assert loaded.chat_template == tokenizer.chat_template
    generation = GenerationConfig.from_pretrained(directory)
    assert generation.eos_token_id == loaded.eos_token_id == loaded.convert_tokens_to_ids(END)
    assert generation.pad_token_id == loaded.pad_token_id == loaded.convert_tokens_to_ids(PAD)
    assert model.config.max_position_embeddings == load_config(ROOT / "configs" / "quickstart.yaml").model.max_length


def test_directory_accuracy_is_the_reported_one(built):
    directory, report = built
    validation = read_jsonl(directory / "validation.jsonl")
    assert directory_accuracy(directory, validation, GREEDY) == report.greedy_accuracy
    sampled = directory_accuracy(directory, validation, Sampling(), samples=4, seed=report.seed)
    assert sampled == report.sampled_accuracy


def test_written_data_is_disjoint_and_complete(built):
    directory, report = built
    train, validation = read_jsonl(directory / "train.jsonl"), read_jsonl(directory / "validation.jsonl")
    assert (len(train), len(validation)) == (SIZES.train, SIZES.validation)
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in validation}
    first = json.loads((directory / "train.jsonl").read_text().splitlines()[0])
    assert list(first) == ["id", "prompt", "answer"]
    figures = json.loads((directory / "warmup.json").read_text())
    assert figures["steps"] == report.steps == SETTINGS.most_steps
    assert figures["target_reached"] is False
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in directory.iterdir())


def test_a_seed_decides_everything(built, tmp_path):
    directory, _ = built
    build(tmp_path / "again", 1, SETTINGS, sizes=SIZES)
    build(tmp_path / "other", 2, SETTINGS, sizes=SIZES)
    for name in sorted(path.name for path in directory.iterdir() if path.name != "warmup.json"):
        assert (tmp_path / "again" / name).read_bytes() == (directory / name).read_bytes(), name
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / "other" / name).read_bytes() != (directory / name).read_bytes(), name
    weights, others = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "other"))
    assert any(not torch.equal(weights[name], others[name]) for name in weights)


def test_existing_output_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="OUTPUT_DIR is .*mine, which holds something already"):
        build(tmp_path / "mine", 1, SETTINGS, sizes=SIZES)
    assert main([str(tmp_path / "mine")]) == 1
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("examples.quickstart.__main__.write_jsonl", fail)
    with pytest.raises(OSError, match="disk full"):
        build(tmp_path / "model", 1, SETTINGS, sizes=SIZES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", ["-1", "4294967296", "x"])
def test_bad_seed_is_refused(tmp_path, seed, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "model"), "--seed", seed])
    assert "--seed" in capsys.readouterr().err
