"""Text of others on a terminal: nothing of it is obeyed."""

import pytest
from rich.table import Table

from services.cli.shared.console import MAX_CHARACTERS
from services.cli.shared.output import plain_console, say

HOSTILE = "[bold]a[/bold]\x1b[2J\x1b]0;title\x07\r\x9b31m\u202eb\x00 redis://:hunter2@host/0"
SHOWN = "[bold]a[/bold]"


@pytest.fixture
def printed(monkeypatch, capsys):
    """What a console made now prints, as a wide terminal would get it."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERM", "xterm")

    def of(what) -> str:
        what(plain_console())
        return capsys.readouterr().out

    return of


def assert_harmless(text: str) -> None:
    assert SHOWN in text
    assert "hunter2" not in text
    assert all(char.isprintable() or char == "\n" for char in text)


def test_a_line(printed):
    assert_harmless(printed(lambda console: say(console, HOSTILE, style="red")))


def test_a_table_in_title_headings_and_cells(printed):
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    text = printed(lambda console: console.print(table))
    assert_harmless(text)
    assert text.count(SHOWN) == 3


def test_a_rule(printed):
    assert_harmless(printed(lambda console: console.rule(HOSTILE)))


def test_what_is_very_long_is_cut(printed):
    assert len(printed(lambda console: say(console, "x" * 10 * MAX_CHARACTERS))) == MAX_CHARACTERS + 1
    table = Table()
    table.add_column("id", no_wrap=True)
    table.add_row("x" * 10 * MAX_CHARACTERS)
    assert max(map(len, printed(lambda console: console.print(table)).splitlines())) <= 400
