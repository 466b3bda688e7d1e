"""The optional dependency, transformers: imported when it is needed, silent, and never asked to run a file's code."""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bf16forensics.errors import InputError

#: Name under which the capture's attention is registered with transformers, and that every model's config carries.
ATTENTION_NAME = "bf16forensics"
#: The first version whose names this package uses.
_OLDEST = 5


def library(module: str = "") -> Any:
    """A module of transformers by its name behind "transformers.", or transformers itself.

    Raises:
        InputError: transformers is not installed, is older than 5.0, or has no such module.
    """
    try:
        root = importlib.import_module("transformers")
    except ImportError as error:
        raise InputError("Hugging Face directories need transformers; install bf16forensics[hf]") from error
    version = str(getattr(root, "__version__", "0"))
    if not version.split(".")[0].isdigit() or int(version.split(".")[0]) < _OLDEST:
        raise InputError(f"Hugging Face directories need transformers {_OLDEST}.0 or newer; upgrade {version}")
    try:
        return importlib.import_module(f"transformers.{module}") if module else root
    except ImportError as error:
        raise InputError(
            f"transformers {version} has no module {module}; install the version that bf16forensics[hf] asks for"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers from writing to stderr: what its warnings are about is checked here and said in one line.

    Not for several threads at once: the settings are those of the process.
    """
    logging = library("utils.logging")
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
