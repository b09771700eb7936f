"""One token per byte and a few special tokens: nothing has to be learned or downloaded."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD = "<|pad|>"
END = "<|end|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{ raise_exception('role is ' ~ message['role'] ~ ', expected system, user or assistant') }}"
    "{%- endif -%}"
    "{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges; `<|end|>` closes every message and so every completion."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def chat_prompts(tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]) -> list[list[int]]:
    """The token ids that the trainer and vLLM give the model for each prompt (data.chat_template: true)."""
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return [
        list(ids) for ids in tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=False)
    ]
