"""SmolLM2's tokenizer from the metadata of its GGUF file."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.smollm2.source import SourceError, TokenizerMetadata


def build_tokenizer(metadata: TokenizerMetadata, *, max_length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE that splits every digit off first, as the pre-tokenizer named smollm does.

    transformers' own conversion leaves that split out: it then splits the white space before a digit differently.
    Raises SourceError for another kind of tokenizer.
    """
    if (metadata.model, metadata.pre, metadata.add_bos_token) != ("gpt2", "smollm", False):
        raise SourceError(
            f"tokenizer.ggml.model, .pre and .add_bos_token are {metadata.model!r}, {metadata.pre!r} and "
            f"{metadata.add_bos_token}, expected 'gpt2', 'smollm' and False"
        )
    vocabulary = {token: index for index, token in enumerate(metadata.tokens)}
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in metadata.merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in metadata.control_tokens]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=metadata.tokens[metadata.bos_token_id],
        eos_token=metadata.tokens[metadata.eos_token_id],
        unk_token=metadata.tokens[metadata.unknown_token_id],
        pad_token=metadata.tokens[metadata.padding_token_id],
        additional_special_tokens=metadata.control_tokens,
        chat_template=metadata.chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
