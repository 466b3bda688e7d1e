"""Entry point of the command line: the exit-code policy and the only top-level `try`."""

import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from bf16forensics.errors import ForensicsError

#: Set to anything but the empty string or 0 for the traceback of an internal error.
TRACEBACK_VARIABLE = "BF16FORENSICS_TRACEBACK"

_INTERNAL_ERROR = 3
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments without the program's name; those of the process when None.

    Returns:
        0 nothing found, 1 findings, 2 bad input or usage, 3 internal error, 130 interrupted.

    Raises:
        SystemExit: passed through from a command.
    """
    with _safe_streams():
        try:
            return _run(argv)
        except KeyboardInterrupt:
            return _fail("interrupted", _INTERRUPTED)
        except ForensicsError as error:
            return _fail(_one_line(error), error.exit_code)
        except BrokenPipeError:
            return 0
        except Exception as error:  # noqa: BLE001 - the policy for everything that nobody foresaw
            if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
                traceback.print_exc()
            kind = type(error).__name__
            return _fail(
                f"internal error: {kind}: {_one_line(error)} (set {TRACEBACK_VARIABLE}=1 for the traceback)",
                _INTERNAL_ERROR,
            )


def _run(argv: Sequence[str] | None) -> int:
    import typer

    from bf16forensics.cli import build

    try:
        # Not standalone: the library would turn an abort into 1, which here means "findings".
        arguments = list(sys.argv[1:] if argv is None else argv)
        code = build(*arguments[:1])(
            args=arguments, prog_name="bf16forensics", standalone_mode=False, obj=tuple(arguments)
        )
    except typer.Abort:
        return _fail("interrupted", _INTERRUPTED)
    except typer.TyperException as error:
        # A group without arguments raises its own help; the class has no public name.
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            return 2
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "bf16forensics"
        return _fail(f"{_one_line(error.format_message())} (see: {command} --help)", 2)
    return code if isinstance(code, int) else 0


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _fail(message: str, exit_code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return exit_code


class _QuietFile(io.FileIO):
    """A file that swallows what is written after its reader went away (`| head`), so that the exit code survives."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


@contextmanager
def _safe_streams() -> Iterator[None]:
    """Makes printing unable to fail: what the console cannot encode is escaped, a closed pipe is ignored."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _safe(sys.stdout), _safe(sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _safe(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_QuietFile(descriptor, "wb", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.isatty(),
    )


if __name__ == "__main__":
    sys.exit(main())
