"""Typed access to a JSON document that anyone may have written: what is not as expected is a one-line error."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from bf16forensics.errors import InputError

_T = TypeVar("_T")
_EXPECTED: Mapping[object, str] = {dict: "an object", list: "a list", str: "a text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """One object of a document."""

    #: Its place for messages: "case/case.json, inputs".
    where: str
    values: Mapping[str, object]

    def part(self, name: str) -> "Fields":
        """An object inside it."""
        return self._fields(name, self._get(name, dict))

    def parts(self, name: str) -> "list[Fields]":
        """A list of objects inside it."""
        return [
            self._fields(f"{name}[{index}]", item if isinstance(item, dict) else None)
            for index, item in enumerate(self._get(name, list))
        ]

    def text(self, name: str) -> str:
        """A text."""
        return self._get(name, str)

    def integer(self, name: str) -> int:
        """A whole number, 0 or more."""
        value = self._get(name, int)
        if isinstance(value, bool) or value < 0:
            raise self._wrong(name, "a whole number")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers, 0 or more."""
        values: list[object] = self._get(name, list)
        found = tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0)
        if len(found) != len(values):
            raise self._wrong(name, "a list of whole numbers")
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        values: list[object] = self._get(name, list)
        found = tuple(item for item in values if isinstance(item, str))
        if len(found) != len(values):
            raise self._wrong(name, "a list of texts")
        return found

    def optional(self, name: str, kind: type[_T]) -> _T | None:
        """A value of a plain type; None where it is null or missing. Whole numbers count as float, never as bool."""
        value = self.values.get(name)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self._wrong(name, f"of type {kind.__name__}, or null")
        return value

    def optional_integers(self, name: str) -> tuple[int | None, ...]:
        """A list of whole numbers and nulls."""
        values: list[object] = self._get(name, list)
        if any(item is not None and (isinstance(item, bool) or not isinstance(item, int)) for item in values):
            raise self._wrong(name, "a list of whole numbers and nulls")
        return tuple(item if isinstance(item, int) else None for item in values)

    def _get(self, name: str, kind: type[_T]) -> _T:
        value = self.values.get(name)
        if not isinstance(value, kind):
            raise self._wrong(name, _EXPECTED.get(kind, "a number"))
        return value

    def _fields(self, name: str, value: object) -> "Fields":
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object")
        return Fields(where=f"{self.where}, {name}", values=value)

    def _wrong(self, name: str, expected: str) -> InputError:
        found = "missing" if self.values.get(name) is None else f"{str(self.values[name])[:40]!r}"
        return InputError(f"{self.where}: {name!r} is not {expected} ({found}); run localize again with -o")
