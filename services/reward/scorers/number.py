"""Numbers in text, in whatever way they are written: 42, 42.0, 1,000, 4.2e1, -1/2."""

import re
from decimal import Context, Decimal

# A sign right after a digit is a minus between two numbers: "10-5" ends with 5. A date is no fraction: 12/24/2024.
_NUMBER = re.compile(
    r"(?<![0-9.])[-+]?(?:"
    r"(?<![/])[0-9]+/[0-9]+(?![0-9/]|\.[0-9])"
    r"|(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r")"
)
# Exact for all that anybody writes as an answer, and bounded for what a model may write. Overflow is Infinity, x/0 NaN
# or Infinity.
_CONTEXT = Context(prec=100, traps=[])


def last_number(text: str) -> Decimal | None:
    """May be infinite or NaN, which no answer is; None where the text holds no number."""
    matches: list[str] = _NUMBER.findall(_plain(text))
    return _read(matches[-1]) if matches else None


def whole_number(text: str) -> Decimal | None:
    """The number that the whole text is, white space around it aside; None where it is none, or none that is finite."""
    match = _NUMBER.fullmatch(_plain(text).strip())
    number = None if match is None else _read(match.group())
    return None if number is None or not number.is_finite() else number


def is_close(given: Decimal, expected: Decimal, *, relative: float, absolute: float) -> bool:
    """As math.isclose, in decimal numbers."""
    if not given.is_finite():
        return False
    difference = _CONTEXT.abs(_CONTEXT.subtract(given, expected))
    larger = _CONTEXT.max(_CONTEXT.abs(given), _CONTEXT.abs(expected))
    allowed = max(_CONTEXT.multiply(Decimal(str(relative)), larger), Decimal(str(absolute)))
    return difference <= allowed


def _read(text: str) -> Decimal:
    numerator, _, denominator = text.replace(",", "").partition("/")
    number = _CONTEXT.create_decimal(numerator)
    return _CONTEXT.divide(number, _CONTEXT.create_decimal(denominator)) if denominator else number


def _plain(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")
