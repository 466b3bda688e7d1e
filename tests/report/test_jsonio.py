"""Canonical JSON: conversion, strictness, reading."""

import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.errors import InputError
from bf16forensics.report.jsonio import SCHEMA_VERSION, dumps, opening, plain, read_json

DOCUMENT = {"schema_version": SCHEMA_VERSION, "b": 1.5, "a": ["\u03b4", None, True]}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_finite_floats_read_back_bit_for_bit(value):
    back = json.loads(dumps({"value": plain(value)}))["value"]
    assert (back, math.copysign(1, back)) == (value, math.copysign(1, value))


@given(st.recursive(st.floats() | st.integers() | st.text() | st.none(), lambda inner: st.lists(inner, max_size=3)))
def test_whatever_is_plain_is_strict_json(value):
    def refuse(name):
        raise AssertionError(name)

    json.loads(dumps({"value": plain(value)}), parse_constant=refuse)


def test_order_is_kept_and_the_text_is_ascii():
    text = dumps(DOCUMENT)
    assert text.isascii()
    assert text.endswith("}\n")
    assert list(json.loads(text)) == ["schema_version", "b", "a"]
    assert json.loads(text)["a"][0] == "\u03b4"


def test_what_does_not_belong_in_a_report_is_refused():
    @dataclass
    class Odd:
        field: object

    with pytest.raises(TypeError, match="complex"):
        plain(Odd(field=1j))
    with pytest.raises(TypeError, match="keys are strings"):
        plain({1: 2})
    with pytest.raises(ValueError, match="JSON"):
        dumps({"value": math.nan})


def test_a_document_begins_with_schema_tool_and_command_as_run():
    head = opening(("bf16forensics", "demo", "--json"), tool_version="1.2")
    assert list(head.items()) == [
        ("schema_version", SCHEMA_VERSION),
        ("tool", {"name": "bf16forensics", "version": "1.2"}),
        ("command", ["bf16forensics", "demo", "--json"]),
    ]


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "case.json"
    path.write_text(dumps(DOCUMENT), encoding="ascii")
    assert read_json(path) == DOCUMENT


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"schema_version": 1, "x": NaN}', "not strict JSON"),
        (b'{"schema_version": 1', "not strict JSON"),
        (b"", "not strict JSON"),
        (b"\xff\xfe", "not text"),
        (b"[1]", "no schema_version"),
        (b'{"schema_version": true}', "no schema_version"),
        (b'{"schema_version": 99}', "schema version 99.*update bf16forensics"),
        (b'{"schema_version": 0}', "schema version 0.*run localize again"),
    ],
)
def test_documents_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "case.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


def test_a_missing_document(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        read_json(tmp_path / "case.json")
