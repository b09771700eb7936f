"""Conversations as the tokens that the model reads: the chat template, and what ends a turn."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from jinja2 import TemplateError

from services.common.config import DataConfig
from services.common.data.rows import refuse_surrogates
from services.common.errors import InvalidData

Message = dict[str, str]

# Stands in for any text while a template is looked at: no template changes a plain word.
PROBE = "trivet"


class AddedToken(Protocol):
    @property
    def content(self) -> str: ...

    @property
    def special(self) -> bool: ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that data need."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def chat_template(self) -> Any: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class Renderer:
    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        """Raises InvalidData that names the key of a template or a tokenizer that cannot be used."""
        self._config, self._tokenizer = config, tokenizer
        if config.chat_template:
            self._check_template()
        elif tokenizer.encode(PROBE)[-1:] == [tokenizer.eos_token_id]:
            raise InvalidData(
                "data_tokenizer",
                "data.chat_template is false, and the tokenizer of model.path ends a plain prompt with its "
                "end-of-sequence token, after which nothing is sampled: set add_eos_token to false in its "
                "tokenizer_config.json",
            )

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """With the chat template, or the last message's text as it stands (data.chat_template: false).

        Raises InvalidData for a conversation that the template refuses.
        """
        if not self._config.chat_template:
            return self._tokenizer.encode(messages[-1]["content"])
        token_ids: list[int] = self._apply(self._with_system(messages), add_generation_prompt=True, tokenize=True)
        return token_ids

    def answer(self, messages: Sequence[Message], text: str) -> list[int]:
        """What the model is to say after `prompt(messages)`, with the token that ends its turn.

        It is the template's own rendering of the answer where that continues the prompt, and `text` as it stands
        where it does not: some templates leave out reasoning, or open the turn in another way.

        Raises InvalidData for a conversation that the template refuses, and for a turn that nothing ends.
        """
        before, said = self._rendered(messages, text)
        prompt, whole = self.prompt(messages), self._encode(before + said)
        # Where tokens of the prompt would merge with the answer's, the prompt's stay as the sampler gets them.
        ids = whole[len(prompt) :] if whole[: len(prompt)] == prompt else self._tokens(said)
        if self._end is not None:
            return ids
        if self._tokenizer.eos_token_id is None:
            raise InvalidData(
                "data_tokenizer", "the tokenizer has no end-of-sequence token, expected one to end answers"
            )
        return [*ids, self._tokenizer.eos_token_id]

    @property
    def end_of_turn(self) -> int | None:
        """The token with which the template ends a turn; None where it has none of its own, and without a template."""
        return None if self._end is None else self._tokens(self._end)[-1]

    def _rendered(self, messages: Sequence[Message], text: str) -> tuple[str, str]:
        """The prompt's text, and the answer's with what ends its turn."""
        if not self._config.chat_template:
            return messages[-1]["content"], text
        conversation = self._with_system(messages)
        before: str = self._apply(conversation, add_generation_prompt=True, tokenize=False)
        whole: str = self._apply([*conversation, _assistant(text)], add_generation_prompt=False, tokenize=False)
        said = whole.removeprefix(before)
        stop = said.rfind(self._end) if self._end is not None else said.rfind(text.strip()) + len(text.strip())
        if said != whole and text.strip() in said[:stop]:
            return before, said[:stop] + (self._end or "")
        return before, text + (self._end or "")

    @cached_property
    def _end(self) -> str | None:
        """What the template writes after an answer, through the first token of its own; None without one."""
        if not self._config.chat_template:
            return None
        question = self._with_system([{"role": "user", "content": PROBE}])
        whole: str = self._apply([*question, _assistant(PROBE)], add_generation_prompt=False, tokenize=False)
        after = whole.rpartition(PROBE)[2]
        added = self._tokenizer.added_tokens_decoder.values()
        # Some tokenizers do not call the end of a turn special; runs of white space can be added tokens, too.
        for tokens in (
            [token for token in added if token.special],
            [token for token in added if token.content.strip()],
        ):
            if ends := [after.index(token.content) + len(token.content) for token in tokens if token.content in after]:
                return after[: min(ends)]
        return None

    def _encode(self, text: str) -> list[int]:
        """As `prompt` does: a template writes the special tokens itself."""
        return self._tokenizer.encode(text, add_special_tokens=not self._config.chat_template)

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        system = self._config.system_prompt
        return list(messages) if system is None else [{"role": "system", "content": system}, *messages]

    def _check_template(self) -> None:
        if not self._tokenizer.chat_template:
            raise InvalidData(
                "data_template",
                "data.chat_template is true, but the tokenizer of model.path has no chat template: set it to false to "
                "use prompts as they stand, or add one to the tokenizer",
            )
        user = [{"role": "user", "content": PROBE}]
        if PROBE not in self._apply(user, add_generation_prompt=True, tokenize=False):
            raise InvalidData(
                "data_template", "data.chat_template is true, but the chat template of model.path leaves out the prompt"
            )
        system = self._config.system_prompt
        if system is None:
            return
        refuse_surrogates(system, "data.system_prompt")
        try:
            rendered: str = self._apply(self._with_system(user), add_generation_prompt=True, tokenize=False)
        except InvalidData as error:
            raise InvalidData(
                "data_template",
                f"data.system_prompt is set, but the chat template of model.path refuses it ({error.__cause__})",
            ) from error
        if system.strip() not in rendered:
            raise InvalidData(
                "data_template", "data.system_prompt is set, but the chat template of model.path leaves it out"
            )

    def _apply(self, conversation: list[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(conversation, return_dict=False, **options)
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in conversation)
            raise InvalidData(
                "data_template",
                f"data.chat_template: the chat template of model.path refuses the roles {roles} ({error})",
            ) from error


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
