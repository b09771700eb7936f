"""Real tokenizers with the chat templates of model families: a token a byte, and the special tokens of the family."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

GEMMA = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}"
    "{%- endif -%}{%- for message in messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
CHATML = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
LLAMA = (
    "{{ bos_token }}{%- for message in messages -%}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"
)
# A space before the answer and before the end, as Llama 2 had them.
SPACED = (
    "{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}{{ ' ' + message['content'] + ' </s>' }}"
    "{%- else -%}{{ '<s>[INST] ' + message['content'] + ' [/INST]' }}{%- endif -%}{%- endfor -%}"
)
# The generation prompt opens the reasoning, and what is past is shown without it.
REASONING = (
    "{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}"
    "{{ '<|assistant|>' + message['content'].split('</think>')[-1] + '<|end|>' }}"
    "{%- else -%}{{ '<|user|>' + message['content'] }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|><think>\n' }}{%- endif -%}"
)
# Neither a system message nor the end of a turn.
PLAIN = (
    "{%- for message in messages -%}{%- if message['role'] != 'system' -%}"
    "{{ message['role'] + ': ' + message['content'] + '\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"
)
FAMILIES = {
    "gemma": (GEMMA, "<eos>", "<bos>", ("<start_of_turn>", "<end_of_turn>")),
    "chatml": (CHATML, "<|endoftext|>", None, ("<|im_start|>", "<|im_end|>")),
    "llama": (
        LLAMA,
        "<|end_of_text|>",
        "<|begin_of_text|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "spaced": (SPACED, "</s>", "<s>", ()),
    "reasoning": (REASONING, "<|endoftext|>", None, ("<|user|>", "<|assistant|>", "<|end|>")),
    "plain": (PLAIN, "</s>", None, ()),
    "none": (None, "</s>", None, ()),
}


def small_tokenizer(
    family: str, *, merges: tuple[tuple[str, str], ...] = (), adds_eos: bool = False
) -> PreTrainedTokenizerFast:
    template, eos, bos, others = FAMILIES[family]
    special = [token for token in (eos, bos, *others) if token is not None]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if adds_eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {eos}", special_tokens=[(eos, tokenizer.token_to_id(eos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        bos_token=bos,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
