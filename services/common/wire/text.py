"""Text from outside, made safe to pass on."""


def readable(value: object, limit: int) -> str:
    """`value` as text that a protobuf, a log and a terminal can take, truncated to `limit` characters.

    Lone surrogates and control characters, line ends and tabs aside, become U+FFFD. Never raises, whatever str() does.
    """
    try:
        # A subclass of str may do what it likes; str's own slice of it is plain.
        text = str.__getitem__(str(value), slice(None, limit))
    except BaseException as error:  # noqa: BLE001 - it is about a foreign object's __str__, which may even exit
        text = f"(text cannot be read: {type(error).__name__})"[:limit]
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
