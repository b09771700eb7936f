"""A tokenizer for tests of data."""


class Words:
    """A tokenizer: one token a word."""

    eos_token_id = 1
    chat_template = "contents"

    @property
    def added_tokens_decoder(self):
        return {}

    def apply_chat_template(self, conversation, *, tokenize, **options):
        text = "".join(message["content"] + " " for message in conversation)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def encode(self, text, *, add_special_tokens=True):
        return [*([0] if add_special_tokens else []), *(len(word) for word in text.split())]
