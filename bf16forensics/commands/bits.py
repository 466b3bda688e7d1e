"""`bf16forensics bits`: one conversion or sum, bit by bit. Loads neither torch nor, for plain operands, NumPy."""

import re
import shutil
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from bf16forensics import __version__
from bf16forensics.commands._options import JsonFlag
from bf16forensics.errors import InputError

if TYPE_CHECKING:
    from fractions import Fraction

    from bf16forensics.commands._bits_event import ExplainedEvent
    from bf16forensics.floats.bits import Bits

#: Negative numbers look like options that nobody knows.
CONTEXT_SETTINGS = {"ignore_unknown_options": True}

_NARROWEST = 60
_WIDEST = 80
_RANDOM = re.compile(r"([0-9]{1,40})/([1-9][0-9]{0,2})")
_OPTION = re.compile(r"--?[A-Za-z].*")
_NEGATIVE_WORD = re.compile(r"-(inf|infinity|nan)", re.IGNORECASE)


class FormatName(StrEnum):
    """Formats by name."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP64 = "fp64"


class Mode(StrEnum):
    """Rounding modes."""

    RNE = "rne"
    RZ = "rz"
    RNA = "rna"
    STOCHASTIC = "stochastic"


class Overflow(StrEnum):
    """What becomes of values beyond the largest finite one."""

    NONFINITE = "nonfinite"
    SATURATE = "saturate"


def _accumulators() -> list[str]:
    from bf16forensics.floats.bits import ACCUMULATORS

    return list(ACCUMULATORS)


def bits(
    context: typer.Context,
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="A [B ...]",
            help="Decimals, hex floats (0x1.8p+1), inf, nan, or bits: 0xC01A, 0b..., 16 or 32 zeros and ones, "
            "bf16:C01A. One value is converted, several are added.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        FormatName | None,
        typer.Option(
            "--from",
            case_sensitive=False,
            help="Format of decimals and of the running sum (default fp32).",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        FormatName | None,
        typer.Option("--to", case_sensitive=False, help="Format to round to (default bf16).", show_default=False),
    ] = None,
    mode: Annotated[Mode, typer.Option(help="Rounding to the --to format; all else is rne.")] = Mode.RNE,
    overflow: Annotated[
        Overflow | None,
        typer.Option(help="Beyond the largest finite value (default: e4m3 and e5m2 saturate).", show_default=False),
    ] = None,
    accumulator: Annotated[
        str,
        typer.Option(
            help="How a sum is kept: fp32-prefix, each-add, exact, sm80, sm90, sm100, sm90-fp8; for an event as in "
            "trace-head.",
            autocompletion=_accumulators,
        ),
    ] = "fp32-prefix",
    event: Annotated[
        str | None,
        typer.Option(
            metavar="CASE:L1.H7:t9:f3:k5",
            help="An addition of a row that trace-head has traced, instead of values: token, feature, key "
            "(and :s0, its sequence).",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Random numbers of mode stochastic.", show_default=False)
    ] = None,
    random: Annotated[
        str | None,
        typer.Option(metavar="BITS/K", help="K random bits for the last rounding, instead.", show_default=False),
    ] = None,
    all_steps: Annotated[bool, typer.Option("--all-steps", help="Every step in full.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Explain one rounding event: alignment, carry, guard, round, sticky, tie, result, error.

    Example: bf16forensics bits 0xC01A 0xC013
    """
    from bf16forensics.floats.bits import explain_bits
    from bf16forensics.floats.formats import BF16, FP32, format_named
    from bf16forensics.floats.literal import read_operand

    for value in values or ():
        if _OPTION.fullmatch(value) and not _NEGATIVE_WORD.fullmatch(value):
            raise InputError(f"no such option: {value}; see bf16forensics bits --help")
    goal = None if target is None else format_named(target)
    if event is not None:
        if values or source is not None or seed is not None or random is not None or mode is Mode.STOCHASTIC:
            raise InputError(
                "--event brings its own values; give it without values, --from, --seed, --random, stochastic"
            )
        from bf16forensics.commands._bits_event import explain_event, parse_event

        found = explain_event(parse_event(event), accumulator, target=goal, mode=mode, overflow=overflow)
        _show(found.bits, context, found, all_steps=all_steps, as_json=as_json)
        return
    source_format = FP32 if source is None else format_named(source)
    explained = explain_bits(
        [read_operand(value, source_format) for value in values or ()],
        accumulator=accumulator,
        source=source_format,
        target=goal or BF16,
        mode=mode,
        overflow=overflow,
        seed=seed,
        random=None if random is None else _read_random(random),
    )
    _show(explained, context, None, all_steps=all_steps, as_json=as_json)


def _show(
    explained: "Bits", context: typer.Context, event: "ExplainedEvent | None", *, all_steps: bool, as_json: bool
) -> None:
    if as_json:
        from bf16forensics.report.bits.document import bits_object
        from bf16forensics.report.jsonio import dumps, opening, plain

        head = opening(("bf16forensics", *(context.obj or ())), tool_version=__version__)
        facts = None if event is None else plain(event.facts)
        typer.echo(dumps(head | {"event": facts} | bits_object(explained)), nl=False)
        return
    from bf16forensics.report.bits.text import bits_text

    width = max(_NARROWEST, min(shutil.get_terminal_size().columns, _WIDEST))
    about = () if event is None else event.about
    typer.echo(bits_text(explained, width, all_steps=all_steps, about=about), nl=False)


def _read_random(text: str) -> "Fraction":
    from bf16forensics.floats.scalar import fraction_from_bits

    match = _RANDOM.fullmatch(text)
    if match is None:
        raise InputError(f"--random {text!r} is not BITS/K; write an integer of K random bits, such as 5/8")
    return fraction_from_bits(int(match[1]), int(match[2]))
