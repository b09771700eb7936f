"""What must not be read in arguments, logs, errors and recorded files."""

import re
from typing import Any

HIDDEN = "***"
_CREDENTIALS = re.compile(r"(?<=://)[^/\s'\"]*@")
_WORDS = r"(?:token|password|passwd|secret|api_?key|credentials?)"
_NAMES = re.compile(rf"(?:^|[_-]){_WORDS}$", re.IGNORECASE)
# "token: value" within a flow mapping.
_IN_YAML = re.compile(rf"((?:\b|_){_WORDS}['\"]?\s*:\s*)[^,}}\s]+", re.IGNORECASE)


def without_password(text: str) -> str:
    """The text with user and password of every address in it replaced."""
    return _CREDENTIALS.sub(f"{HIDDEN}@", text)


def is_secret_name(name: str) -> bool:
    """Whether a key's name says that its value is a secret."""
    return _NAMES.search(name) is not None


def hidden(value: Any, name: str = "") -> Any:
    """A copy of a value, or of a tree of them, in which secrets are replaced: by their key's name, or in addresses."""
    if isinstance(value, dict):
        return {key: hidden(each, str(key)) for key, each in value.items()}
    if value is not None and not isinstance(value, bool) and is_secret_name(name):
        return HIDDEN
    if isinstance(value, list | tuple):
        return [hidden(each, name) for each in value]
    return without_password(value) if isinstance(value, str) else value


def hidden_override(override: str) -> str:
    """ "section.key=value" as it may be shown."""
    key, separator, value = override.partition("=")
    if is_secret_name(key.rpartition(".")[2]):
        return f"{key}{separator}{HIDDEN}"
    shown = _IN_YAML.sub(rf"\1{HIDDEN}", value)
    return f"{key}{separator}{without_password(shown)}"
