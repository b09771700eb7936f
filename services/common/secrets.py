"""What must not be read in arguments, logs, errors and recorded files."""

import re
from typing import Any

HIDDEN = "***"
_WORDS = r"(?:token|password|passwd|pwd|secret|(?:api|access|secret|account|private)_?key|credentials?|signature)"
_NAMES = re.compile(rf"(?:^|[_-]){_WORDS}$", re.IGNORECASE)
# User and password of an address.
_CREDENTIALS = re.compile(r"(?<=://)[^/\s\"]*@")
# Parameters of an address's query, where also "key" and "sig" are secrets.
_QUERY = re.compile(rf"([?&;][\w.-]*(?:{_WORDS}|key|key_?id|sig|auth)=)[^&;\s\"#]+", re.IGNORECASE)
# What an HTTP client or a gRPC call sends; "<token>" stands for one.
_BEARER = re.compile(r"\b(Bearer|Basic) (?!<)[^\s'\",]+", re.IGNORECASE)
# "password='value'" and "'password': 'value'", as objects are printed.
_PRINTED = re.compile(rf"((?:\b|_){_WORDS}['\"]?\s*[:=]\s*)(b?(['\"])(?:\\.|(?!\3).)*\3)", re.IGNORECASE)
# "token: value" within a flow mapping.
_IN_YAML = re.compile(rf"((?:\b|_){_WORDS}['\"]?\s*:\s*)[^,}}\s]+", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """The text with the secrets in it replaced: those of addresses, their queries included, of headers, and of printed
    objects.
    """
    text = _CREDENTIALS.sub(f"{HIDDEN}@", text)
    text = _QUERY.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    return _PRINTED.sub(rf"\1'{HIDDEN}'", text)


def is_secret_name(name: str) -> bool:
    """Whether a key's name says that its value is a secret."""
    return _NAMES.search(name) is not None


def hidden(value: Any, name: str = "") -> Any:
    """A copy of a value, or of a tree of them, in which secrets are replaced: by their key's name, or in addresses."""
    if value is not None and not isinstance(value, bool) and is_secret_name(name):
        return HIDDEN
    if isinstance(value, dict):
        return {key: hidden(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(each) for each in value]
    return without_secrets(value) if isinstance(value, str) else value


def hidden_override(override: str) -> str:
    """ "section.key=value" as it may be shown."""
    key, separator, value = override.partition("=")
    if is_secret_name(key.rpartition(".")[2]):
        return f"{key}{separator}{HIDDEN}"
    shown = _IN_YAML.sub(rf"\1{HIDDEN}", value)
    return f"{key}{separator}{without_secrets(shown)}"
