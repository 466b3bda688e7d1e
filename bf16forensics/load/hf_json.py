"""The JSON files of a Hugging Face directory, read strictly: one object, no key twice."""

import json
from collections import Counter
from pathlib import Path

from bf16forensics.errors import InputError
from bf16forensics.load.files import first_bytes, unreadable

#: Far above any configuration or index that exists.
_MAX_BYTES = 256 << 20


def read_json_object(path: str | Path) -> dict[str, object]:
    """The object in a JSON file. NaN and Infinity are read as such: who uses a number checks it.

    Raises:
        InputError: unreadable, empty, a Git LFS pointer, not JSON, no object, or a key that occurs twice.
    """
    first_bytes(path)
    try:
        if Path(path).stat().st_size > _MAX_BYTES:
            raise InputError(f"{path}: larger than {_MAX_BYTES >> 20} MiB, no configuration or index; check the file")
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file; expected JSON. Copy or download it again") from error

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise InputError(f"{path}: the key '{twice}' occurs twice in one object; remove one")
        return made

    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({_reason(error)}). Copy or download it again") from error
    if not isinstance(parsed, dict):
        raise InputError(f"{path}: holds no JSON object; give the file that belongs to the model")
    return parsed


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.lower()} in line {error.lineno}"
    return "nested too deep" if isinstance(error, RecursionError) else "a number too long"


def shown(value: object) -> str:
    """A JSON value in an error message or note: as JSON, cut where it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 40 else text[:39] + "…"
