"""The errors that a person is meant to read.

Each carries one line: what is wrong, where (file, tensor, line), what to do. `__main__.main` turns them into an exit
code; anything else that escapes is an internal error (exit 3).
"""


class ForensicsError(Exception):
    """Base of every error that is reported as one line without a traceback."""

    #: Exit code of the process when this error reaches `main`.
    exit_code = 2


class InputError(ForensicsError):
    """A file, tensor or option that cannot be used as given (exit 2)."""


class RecipeError(InputError):
    """An unknown recipe, rounding point or value (exit 2)."""


class InterruptedRun(ForensicsError):
    """A run stopped by the user; what was finished has been reported (exit 130)."""

    exit_code = 130
