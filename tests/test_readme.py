"""The README says what the code and the tests say: its tables are generated, its commands exist."""

from pathlib import Path

from update_readme import updated

ROOT = Path(__file__).parents[1]


def test_its_tables_are_up_to_date() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert text == updated(text), "run `python tests/update_readme.py`"


def test_it_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for command in ("make demo", "make test", "make test-full"):
        assert command in text
        assert f"\n{command.removeprefix('make ')}:" in makefile
