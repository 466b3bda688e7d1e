"""Canonical JSON: conversion, strictness, atomic writing."""

import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bf16forensics.errors import InputError
from bf16forensics.report import jsonio
from bf16forensics.report.jsonio import SCHEMA_VERSION, dumps, plain, read_json, write_json

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


def test_a_file_is_not_replaced_without_force(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, DOCUMENT, force=False)
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"a\.json exists; pass --force"):
        write_json(path, {"schema_version": 1}, force=False)
    assert path.read_bytes() == before
    write_json(path, {"schema_version": 1}, force=True)
    assert read_json(path) == {"schema_version": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, DOCUMENT, force=False)
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jsonio.os, "fsync", fail)
    with pytest.raises(InputError, match="No space left"):
        write_json(path, {"schema_version": 1}, force=True)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_places_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match="cannot write"):
        write_json(tmp_path / "missing" / "a.json", DOCUMENT, force=False)
    with pytest.raises(InputError, match="is a directory"):
        write_json(tmp_path, DOCUMENT, force=True)


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
