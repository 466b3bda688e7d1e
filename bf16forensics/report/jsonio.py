"""Canonical JSON: strict, in fixed key order."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from bf16forensics.errors import InputError

#: Grows when a field is renamed, removed or changes its meaning; added fields do not count.
SCHEMA_VERSION = 1


def plain(value: object) -> object:
    """Converts dataclasses, mappings, sequences and scalars to what strict JSON holds.

    Args:
        value: a dataclass instance, mapping with string keys, list, tuple, str, int, float, bool or None, nested.

    Returns:
        The same with dataclasses and mappings as dict (order kept), tuples as list, and NaN, inf, -inf as the strings
        "nan", "inf", "-inf". Finite floats, -0.0 included, stay as they are and are printed so that they read back
        equal.

    Raises:
        TypeError: a value of another type, or a key that is not a string.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"JSON keys are strings; got {key!r}")
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} does not belong in a report; got {value!r}")


def dumps(document: Mapping[str, object]) -> str:
    """The document as text ending in a newline, ASCII only, so that no console or code page can damage it.

    Raises:
        ValueError: a float is not finite (pass the document through `plain` first).
    """
    return json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def opening(command: Sequence[str], *, tool_version: str) -> dict[str, object]:
    """What every document begins with.

    Args:
        command: the command as run, program name first.
        tool_version: version of this package.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "bf16forensics", "version": tool_version},
        "command": list(command),
    }


def read_json(path: Path) -> dict[str, object]:
    """Reads the document of a case, and checks that this version can read it.

    Raises:
        InputError: missing, not strict JSON, not a document of this tool, or written by a later schema version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; name the case.json of a case") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text; name the case.json of a case") from error
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise InputError(f"{path} is not strict JSON ({error}); run localize again with -o") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(version, int) or isinstance(version, bool):
        raise InputError(f"{path} has no schema_version: not a document of bf16forensics; name the case.json of a case")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{path} has schema version {version}, this program reads {SCHEMA_VERSION}; "
            f"{'update bf16forensics' if version > SCHEMA_VERSION else 'run localize again'}"
        )
    return dict(document)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
