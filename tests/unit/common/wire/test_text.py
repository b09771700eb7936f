import pytest

from services.common.wire.text import readable


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain\ttext\nover lines", "plain\ttext\nover lines"),
        ("\ud800 \x1b[31m \x00", "\ufffd \ufffd[31m \ufffd"),
        ("中文 🙂", "中文 🙂"),
        ("x" * 100, "x" * 40),
        (KeyError("a"), "'a'"),
    ],
)
def test_readable_text_is_utf8_without_controls_and_not_too_long(value, text):
    assert readable(value, 40) == text


class Unreadable:
    def __str__(self):
        raise SystemExit(1)


def test_what_has_no_text_says_so():
    assert readable(Unreadable(), 100) == "(text cannot be read: SystemExit)"
