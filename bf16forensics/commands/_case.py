"""A case as the commands that take one read it: which run it was, by which recipe, and which heads it kept."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bf16forensics.commands._fields import Fields
from bf16forensics.errors import InputError, RecipeError

if TYPE_CHECKING:
    from bf16forensics.investigate.inputs import InputOptions
    from bf16forensics.load.files import FileFacts
    from bf16forensics.recipe.model import Recipe

_HEAD = re.compile(r"L([0-9]{1,6})\.H([0-9]{1,6})")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """One file of tensors that the case lists."""

    layer: int
    head: int
    #: Positions among the sequences of the run, and their steps.
    sequences: tuple[int, ...]
    steps: tuple[int | None, ...]
    #: SHA-256 of the tensors' bytes in name order.
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a case.json says, checked as far as it is used."""

    #: Directory as given.
    directory: Path
    recipe: "Recipe"
    #: "fp32" or "fp64".
    reference: str
    #: "nanogpt", "hf" or "record".
    kind: str
    #: Geometry in words.
    shape: str
    activations: str | None
    num_layers: int
    num_heads: int
    #: Sequences analysed.
    sequences: int
    #: (layer, head), the most important first; may be empty.
    ranking: tuple[tuple[int, int], ...]
    files: "tuple[FileFacts, ...]"
    #: How the input was named; None in a case of an earlier version.
    options: "InputOptions | None"
    #: Directory that relative paths are relative to; empty where unknown.
    working_directory: str
    #: Version of torch that the run used; None where unknown.
    torch_version: str | None
    kept: tuple[KeptFile, ...]

    def kept_file(self, layer: int, head: int) -> KeptFile | None:
        """The file of a head; None where it was not kept."""
        return next((item for item in self.kept if (item.layer, item.head) == (layer, head)), None)


def is_case(path: Path) -> bool:
    """Whether a path is a directory that holds a case.json."""
    from bf16forensics.report.case import DOCUMENT

    return (path / DOCUMENT).is_file()


def open_case(directory: Path) -> Case:
    """Reads the document of a case.

    Raises:
        InputError: not a case, of another schema version, or damaged; one line that names the field.
    """
    from bf16forensics.report.case import DOCUMENT, read_case

    document = Fields(where=str(directory / DOCUMENT), values=read_case(directory))
    inputs, environment = document.part("inputs"), document.part("environment")
    volatile = environment.part("volatile")
    reference = document.text("reference")
    if reference not in ("fp32", "fp64"):
        raise InputError(f"{document.where}: reference {reference[:40]!r} is not fp32 or fp64; run localize again")
    return Case(
        directory=directory,
        recipe=_recipe(document),
        reference=reference,
        kind=inputs.text("kind"),
        shape=inputs.text("shape"),
        activations=inputs.optional("activations", str),
        num_layers=inputs.integer("num_layers"),
        num_heads=inputs.integer("num_heads"),
        sequences=inputs.integer("sequences"),
        ranking=tuple(_head(name, document.where) for name in document.texts("ranking")),
        files=tuple(_facts(item) for item in inputs.parts("files")),
        options=None if inputs.values.get("capture") is None else _options(inputs.part("capture")),
        working_directory=volatile.optional("working_directory", str) or "",
        torch_version=environment.optional("torch", str),
        # A document that was written without -o lists no tensors.
        kept=tuple(_kept(item) for item in document.parts("tensors")) if "tensors" in document.values else (),
    )


def _recipe(document: Fields) -> "Recipe":
    from bf16forensics.recipe.files import recipe_of_table

    try:
        return recipe_of_table(document.part("recipe").values, Path(document.where))
    except RecipeError as error:
        raise InputError(f"{error} (or the case is of another version: run localize again)") from error


def _head(name: str, where: str) -> tuple[int, int]:
    match = _HEAD.fullmatch(name)
    if match is None:
        raise InputError(f"{where}: ranking holds {name[:40]!r}, which is no head such as L1.H7; run localize again")
    return int(match[1]), int(match[2])


def _facts(item: Fields) -> "FileFacts":
    from bf16forensics.load.files import FileFacts

    return FileFacts(
        role=item.text("role"),
        path=item.text("path"),
        size_bytes=item.integer("size_bytes"),
        sha256=item.text("sha256"),
    )


def _kept(item: Fields) -> KeptFile:
    sequences, steps = item.integers("sequences"), item.optional_integers("steps")
    if len(sequences) != len(steps):
        raise InputError(f"{item.where}: sequences and steps differ in number; run localize again with -o")
    return KeptFile(
        layer=item.integer("layer"),
        head=item.integer("head"),
        sequences=sequences,
        steps=steps,
        sha256=item.text("sha256"),
    )


def _options(item: Fields) -> "InputOptions":
    from bf16forensics.investigate.inputs import InputOptions

    lines = item.integers("lines") if item.values.get("lines") is not None else None
    if lines is not None and len(lines) != 2:
        raise InputError(f"{item.where}: lines are not two numbers; run localize again with -o")
    return InputOptions(
        checkpoint=item.optional("checkpoint", str),
        batch=item.optional("batch", str),
        indices=item.optional("indices", str),
        lines=None if lines is None else (lines[0], lines[1]),
        sequences=item.optional("sequences", int),
        first_step=item.optional("first_step", int),
        n_head=item.optional("n_head", int),
        activations=item.optional("activations", str),
        device=item.optional("device", str),
        allow_bin=item.optional("allow_bin", bool),
        record=item.optional("record", str),
        layout=item.optional("layout", str),
        dtype=item.optional("dtype", str),
        causal=item.optional("causal", bool),
        window=item.optional("window", int),
        softcap=item.optional("softcap", float),
        scale=item.optional("scale", float),
    )
