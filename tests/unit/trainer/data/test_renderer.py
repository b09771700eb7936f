import pytest

from services.common.config import DataConfig
from services.common.errors import InvalidData
from services.trainer.data.renderer import Renderer
from tests.support.trainer.small_tokenizers import small_tokenizer

SOURCE = {"kind": "jsonl", "path": "none.jsonl"}
QUESTION = [{"role": "user", "content": "1+1?"}]


def renderer(tokenizer, **settings):
    return Renderer(DataConfig(train=SOURCE, **settings), tokenizer)


def rendered(tokenizer, messages, text, **settings):
    """Prompt and answer as text, decoded from their tokens."""
    made = renderer(tokenizer, **settings)
    return tokenizer.decode(made.prompt(messages)), tokenizer.decode(made.answer(messages, text))


@pytest.mark.parametrize(
    ("family", "prompt", "answer"),
    [
        ("gemma", "<bos><start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n", "two<end_of_turn>"),
        ("chatml", "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n", "two<|im_end|>"),
        (
            "llama",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "two<|eot_id|>",
        ),
        ("spaced", "<s>[INST] 1+1? [/INST]", " two </s>"),
        # What the template does not end ends with the tokenizer's token.
        ("plain", "user: 1+1?\nassistant: ", "two</s>"),
    ],
)
def test_an_answer_ends_as_the_template_ends_a_turn(family, prompt, answer):
    tokenizer = small_tokenizer(family)
    assert rendered(tokenizer, QUESTION, "two") == (prompt, answer)


@pytest.mark.parametrize("family", ["gemma", "chatml", "llama", "spaced"])
@pytest.mark.parametrize("text", ["n", "o", ">", "end", " two ", "\ntwo\n", "two\n\ntwo"])
def test_prompt_and_answer_are_the_rendered_conversation_up_to_the_end_of_the_turn(family, text):
    tokenizer = small_tokenizer(family)
    made = renderer(tokenizer)
    whole = tokenizer.apply_chat_template([*QUESTION, {"role": "assistant", "content": text}], return_dict=False)
    ids = made.prompt(QUESTION) + made.answer(QUESTION, text)
    assert whole[: len(ids)] == ids
    assert tokenizer.decode(whole[len(ids) :]).strip() == ""
    assert ids[-1] in tokenizer.all_special_ids or tokenizer.added_tokens_decoder[ids[-1]].special


def test_without_a_template_the_answer_ends_with_the_tokenizers_token():
    tokenizer = small_tokenizer("gemma")
    assert rendered(tokenizer, QUESTION, "two", chat_template=False) == ("1+1?", "two<eos>")


def test_an_answer_that_the_template_rewrites_is_used_as_it_stands_with_the_templates_end():
    tokenizer = small_tokenizer("reasoning")
    prompt, answer = rendered(tokenizer, QUESTION, "1 and 1</think>two")
    assert prompt.endswith("<|assistant|><think>\n")
    assert answer == "1 and 1</think>two<|end|>"


def test_tokens_of_the_prompt_do_not_merge_with_the_answers():
    """The sampler gets the prompt alone, so that a token over the boundary is never sampled."""
    merges = (("Ċ", "Ċ"),)
    tokenizer = small_tokenizer("chatml", merges=merges)
    made = renderer(tokenizer)
    prompt, answer = made.prompt(QUESTION), made.answer(QUESTION, "\ntwo")
    assert tokenizer.decode(prompt).endswith("assistant\n")
    assert tokenizer.decode(answer) == "\ntwo<|im_end|>"
    whole = tokenizer.apply_chat_template([*QUESTION, {"role": "assistant", "content": "\ntwo"}], return_dict=False)
    assert whole[: len(prompt)] != prompt


def test_an_answer_that_nothing_ends_is_refused():
    tokenizer = small_tokenizer("plain")
    tokenizer.eos_token = None
    with pytest.raises(InvalidData, match="the tokenizer has no end-of-sequence token"):
        renderer(tokenizer).answer(QUESTION, "two")


def test_a_template_that_refuses_the_system_role_names_the_key():
    with pytest.raises(InvalidData, match=r"data.system_prompt is set, .* refuses it \(System role not supported\)"):
        renderer(small_tokenizer("gemma"), system_prompt="be brief")


def test_a_template_that_leaves_the_system_prompt_out_names_the_key():
    with pytest.raises(InvalidData, match=r"data.system_prompt is set, but .* leaves it out"):
        renderer(small_tokenizer("plain"), system_prompt="be brief")


def test_a_system_prompt_that_is_no_text_names_the_key():
    with pytest.raises(InvalidData, match=r"data.system_prompt holds '\\ud83d' at character 2"):
        renderer(small_tokenizer("chatml"), system_prompt="b \ud83d")


def test_a_system_prompt_is_part_of_the_prompt():
    prompt, answer = rendered(small_tokenizer("chatml"), QUESTION, "two", system_prompt="be brief\n")
    assert prompt.startswith("<|im_start|>system\nbe brief")
    assert answer == "two<|im_end|>"


def test_a_tokenizer_without_a_chat_template_names_the_key():
    tokenizer = small_tokenizer("none")
    with pytest.raises(InvalidData, match=r"data.chat_template is true, but .* has no chat template: set it to false"):
        renderer(tokenizer)
    assert rendered(tokenizer, QUESTION, "two", chat_template=False) == ("1+1?", "two</s>")


def test_a_tokenizer_that_ends_a_plain_prompt_is_refused():
    tokenizer = small_tokenizer("chatml", adds_eos=True)
    with pytest.raises(InvalidData, match=r"data.chat_template is false, and .* set add_eos_token to false"):
        renderer(tokenizer, chat_template=False)
    assert rendered(tokenizer, QUESTION, "two")[1] == "two<|im_end|>"


def test_a_conversation_that_the_template_refuses_says_why():
    made = renderer(small_tokenizer("gemma"))
    with pytest.raises(InvalidData, match="refuses the roles user, user .Conversation roles must alternate"):
        made.prompt([*QUESTION, *QUESTION])
