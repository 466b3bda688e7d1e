"""The pages against the program: commands, options, fields, outputs and links are what there is now."""

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from bf16forensics.cli import build
from bf16forensics.recipe.model import Recipe
from bf16forensics.verdict.findings import VERDICTS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path for place in ("*.md", "docs/**/*.md", "examples/**/*.md") for path in ROOT.glob(place))
COMMANDS = ("localize", "trace-head", "bits", "explain", "recipe", "doctor", "demo")
#: Commands whose output depends on nothing but the command: those of the others hold times, versions and machines.
FIXED = ("bits", "explain", "recipe")
PROGRAM = "bf16forensics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A command of a page, and what the page shows below it."""

    page: str
    words: tuple[str, ...]
    output: tuple[str, ...]


def fences(text: str) -> Iterator[list[str]]:
    """The lines of every fenced block."""
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, flags=re.M | re.S):
        yield block.splitlines()


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def shown(page: Path) -> Iterator[Shown]:
    """Every command at a prompt, over several lines where it is continued."""
    for lines in fences(page.read_text(encoding="utf-8")):
        if not lines or not lines[0].startswith(f"$ {PROGRAM} "):
            continue
        end = next(index for index, line in enumerate(lines) if not line.endswith("\\"))
        command = " ".join(line.removesuffix("\\") for line in lines[: end + 1])
        words = shlex.split(command.removeprefix(f"$ {PROGRAM} "))
        yield Shown(page=str(page.relative_to(ROOT)), words=tuple(words), output=tuple(lines[end + 1 :]))


def advised(page: Path) -> Iterator[tuple[str, ...]]:
    """Every command inside a block that could be copied: no synopsis with its brackets and bars."""
    for lines in fences(page.read_text(encoding="utf-8")):
        text = "\n".join(lines).replace("\\\n", " ")
        for line in text.splitlines():
            found = re.fullmatch(rf"(?:\$ |next +| *){PROGRAM} ([a-z].*)", line)
            if found and not re.search(r"[\[|]|\.\.\.", found[1]):
                yield tuple(shlex.split(found[1]))


ALL_SHOWN = [item for page in PAGES for item in shown(page)]
ALL_ADVISED = sorted({words for page in PAGES for words in advised(page)})


def parse(words: Sequence[str]) -> None:
    """Parses a command line without running anything; a typing error is an exception."""
    command: Any = typer.main.get_command(build())
    context, rest = None, list(words)
    while True:
        named = PROGRAM if context is None else rest.pop(0)
        context = command.make_context(named, rest, parent=context)
        if not hasattr(command, "commands"):
            return
        rest = [*context._protected_args, *context.args]
        command = command.commands[rest[0]]


def options(name: str) -> list[set[str]]:
    """The spellings of every option of a command and of the commands below it, without `--help`."""
    group: Any = typer.main.get_command(build())
    command = group.commands[name]
    below = [command, *getattr(command, "commands", {}).values()]
    fields = [field for item in below for field in item.params if field.param_type_name == "option"]
    return [{*field.opts, *field.secondary_opts} for field in fields if field.name != "help"]


def test_the_pages_show_every_command() -> None:
    assert {item.words[0] for item in ALL_SHOWN} >= set(COMMANDS) - {"demo"}
    assert {words[0] for words in ALL_ADVISED} <= set(COMMANDS)
    assert len(ALL_ADVISED) > 12


@pytest.mark.parametrize("words", ALL_ADVISED, ids=" ".join)
def test_a_command_of_a_page_parses(words: tuple[str, ...]) -> None:
    parse(words)


@pytest.mark.parametrize("text", ["localize --nope", "bits 1 --to nope", "demo --twin nope", "recipe nope", "nope"])
def test_what_does_not_parse_is_seen(text: str) -> None:
    with pytest.raises(Exception, match="nope"):
        parse(text.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_names_the_options_that_its_command_has(name: str) -> None:
    # The options of an input are described once.
    pages = (name, "localize") if name == "trace-head" else (name,)
    text = "".join((ROOT / "docs" / "commands" / f"{page}.md").read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text))
    assert [spellings for spellings in options(name) if not spellings & named] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_names_no_option_that_nothing_has(name: str) -> None:
    """Pages name options of other commands too, but those of this program only."""
    text = (ROOT / "docs" / "commands" / f"{name}.md").read_text(encoding="utf-8")
    known = {text for command in COMMANDS for spellings in options(command) for text in spellings} | {"--help"}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) <= known


@pytest.mark.parametrize(
    "item", [item for item in ALL_SHOWN if item.words[0] in FIXED], ids=lambda item: f"{item.page}: {item.words[0]}"
)
def test_an_output_on_a_page_is_what_is_printed_now(run_cli: Callable[..., Any], item: Shown) -> None:
    """A line "..." stands for any number of lines; the README leaves lines out without one."""
    done = run_cli(item.words)
    assert done.exit_code == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if line]
    is_abridged = item.page == "README.md"
    position, may_skip = 0, is_abridged
    for line in filter(None, item.output):
        if line == "...":
            may_skip = True
            continue
        rest = printed[position:] if may_skip else printed[position : position + 1]
        assert line in rest
        position += rest.index(line) + 1
        may_skip = is_abridged
    assert may_skip or position == len(printed), printed[position:]


def keys(value: object) -> Iterator[str]:
    """The names of all fields of a document, at any depth."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from keys(item)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("localize", "localize.json"),
        ("trace-head", "trace.json"),
        ("bits", "bits 1.1 --mode stochastic --seed 1 --json"),
        ("bits", "bits 1 2 0x1p-24 --accumulator sm80 --json"),
        ("explain", "explain BF301 --json"),
        ("recipe", "recipe show fa2 --json"),
    ],
)
def test_every_field_of_a_document_is_described(run_cli: Callable[..., Any], name: str, source: str) -> None:
    if source.endswith(".json"):
        text = (ROOT / "tests" / "golden" / source).read_text(encoding="utf-8")
    else:
        text = run_cli(source.split()).stdout
    # The fields of a recipe are described by `recipe show`; names of verdicts are values that stand as keys.
    known = {field.name for field in dataclasses.fields(Recipe)} | set(VERDICTS)
    pages = [ROOT / "docs" / "json.md", ROOT / "docs" / "commands" / f"{name}.md"]
    quoted = re.findall(r"`([^`]+)`", "".join(map(prose, pages)))
    described = {word for text in quoted for word in re.findall(r"\w+", text)}
    assert set(keys(json.loads(text))) - known - described == set()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, by the rule of GitHub."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        found = (page.parent / place).resolve() if place else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target
