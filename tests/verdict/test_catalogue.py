"""The documentation of the codes."""

import dataclasses

import pytest

from bf16forensics.errors import InputError
from bf16forensics.report.findings_page import as_list, as_markdown, as_text
from bf16forensics.verdict.catalogue import entries, entry
from bf16forensics.verdict.findings import SEVERITIES


def test_codes_and_names_are_unique_and_sorted():
    codes = [item.code for item in entries()]
    assert codes == sorted(set(codes))
    assert len({item.name for item in entries()}) == len(codes)


@pytest.mark.parametrize("item", entries(), ids=lambda item: item.code)
def test_every_entry_is_complete_plain_ascii(item):
    assert item.severity in SEVERITIES
    assert item.name == item.name.lower().replace(" ", "-").replace("_", "-")
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        texts = value if isinstance(value, tuple) else (value,)
        assert texts
        for text in texts:
            assert text.strip()
            assert text.isascii()
    assert "undecided" not in item.severity
    for width in (80, 100):
        assert max(map(len, as_text(item, width).splitlines())) <= width


@pytest.mark.parametrize("code", ["bf301", " BF301 ", "Bf301"])
def test_case_and_blanks_do_not_matter(code):
    assert entry(code).code == "BF301"


def test_an_unknown_code_names_the_nearest():
    with pytest.raises(InputError, match=r"unknown finding code 'BF310'; nearest: .*BF301.*list all"):
        entry("BF310")
    with pytest.raises(InputError, match="codes run from BF101 to BF906"):
        entry("teapot")


def test_undecided_codes_are_notes():
    assert {item.severity for item in entries() if item.code.startswith("BF9")} == {"note"}


def test_the_page_in_docs_is_the_catalogue(repository, fakes):
    page = as_markdown(entries())
    path = repository / "docs" / "findings.md"
    fakes.check_golden(path, page)
    for item in entries():
        assert f"## {item.code}" in page


def test_the_list_has_one_entry_a_code():
    lines = as_list(entries(), 80).splitlines()
    assert [line[:5] for line in lines if line.startswith("BF")] == [item.code for item in entries()]
    assert max(map(len, lines)) <= 80
