"""What a model's directory or hub id has to contain, checked before anything is loaded."""

from collections.abc import Iterator
from pathlib import Path

from services.common.config import Config
from services.common.data.model_path import check_model_path
from services.common.errors import InvalidData, Unavailable
from services.trainer.data.renderer import Renderer, Tokenizer

VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
HUB_SECONDS = 10.0


def model_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Key and value of every model that the trainer reads."""
    yield "model.path", config.model.path
    for key, path in (
        ("reference.path", config.reference.path),
        ("algorithm.critic_path", config.algorithm.critic_path),
    ):
        if path is not None:
            yield key, path


def check_model(path: str, key: str) -> None:
    """Raises InvalidData that names `key` where there is no checkpoint, Unavailable where the hub does not answer."""
    from transformers import AutoConfig

    check_model_path(path, key)
    if not Path(path).is_dir():
        _ask_hub(path, f"{key} is {path!r}: there is no such directory")
        return
    try:
        AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidData(
            "model_unreadable", f"{key} is {path!r}, whose config.json transformers does not read ({error})"
        ) from error


def model_positions(path: str) -> int | None:
    """Tokens that the model of a directory has positions for; None where its config.json does not say."""
    from transformers import AutoConfig

    if not Path(path).is_dir():
        return None
    config = AutoConfig.from_pretrained(path).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    # Scaled, there are more; by how much is up to the kind (yarn, llama3, longrope).
    return None if positions is None or "factor" in rope or "long_factor" in rope else int(positions)


def open_tokenizer(path: str) -> Tokenizer:
    """Raises InvalidData if there is none, Unavailable if it should come from the hub and the hub fails."""
    from transformers import AutoTokenizer

    # Without any, transformers makes an empty tokenizer for some models.
    if Path(path).is_dir() and not any(file for pattern in VOCABULARIES for file in Path(path).glob(pattern)):
        raise InvalidData("tokenizer_missing", f"model.path is {path!r}, which has no tokenizer (tokenizer.json)")
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = f"model.path is {path!r}, which has no tokenizer that transformers reads ({error})"
        if isinstance(error, OSError) and not Path(path).is_dir():
            raise Unavailable("hub_unavailable", reason) from error
        raise InvalidData("tokenizer_missing", reason) from error
    return tokenizer


def unstopped_turn(config: Config, tokenizer: Tokenizer) -> str | None:
    """A sentence where the model ends its turns with a token at which the sampler does not stop; None if it does.

    vLLM ends a completion at the tokenizer's end-of-sequence token and at those of the model's generation config.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        end = Renderer(config.data, tokenizer).end_of_turn
    except InvalidData:
        # A template for prompts alone has no assistant's turn to end.
        return None
    try:
        given = GenerationConfig.from_pretrained(config.model.path).eos_token_id
    except OSError:
        given = getattr(AutoConfig.from_pretrained(config.model.path), "eos_token_id", None)
    if end is None or end == tokenizer.eos_token_id or end in (given if isinstance(given, list) else [given]):
        return None
    return (
        f"model.path is {config.model.path!r}, whose chat template ends a turn with the token {end}, at which the "
        "sampler does not stop: completions run to sampling.max_tokens unless eos_token_id in its "
        "generation_config.json names the token, too"
    )


def _ask_hub(name: str, missing: str) -> None:
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import RepositoryNotFoundError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        HfApi(endpoint=constants.ENDPOINT).model_info(name, timeout=HUB_SECONDS)
    except RepositoryNotFoundError as error:
        raise InvalidData("model_missing", f"{missing}, nor such a model on the hub that may be read") from error
    except Exception as error:
        # Whatever its client raises: no network, a proxy, a server in trouble.
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Unavailable("hub_unavailable", f"{missing}, and the hub cannot be asked for it ({reason})") from error
