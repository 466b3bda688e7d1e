"""Writes recorded batches from plain text: a safetensors file that `bf16forensics localize --batch` reads.

    python examples/smollm2/make_batches.py TEXT... --tokenizer DIRECTORY --tokens T --sequences S -o prose.safetensors
    python examples/smollm2/make_batches.py --repeat " the" --tokenizer DIRECTORY -o the.safetensors

The file holds `input_ids` [S, T] and `steps` [S], int64. There are no labels in it: each position predicts the next
token. With `--pad` it has an `attention_mask` [S, T + padding] too, and padding neither is predicted nor predicts; with
`--no-mask` it has `labels` instead, -100 at padding: the rows of the padding then see the padding before them.

A text is cut into windows of T tokens one after the other, from its first token on, without any special token; what is
left at its end is not used. Of several texts one window each is taken in turn; a text that has run out is passed over.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Label of a token that nothing is learnt from, in Hugging Face's convention.
IGNORED_LABEL = -100


class Refused(Exception):
    """Input that cannot be used; the message is one line."""


def open_tokenizer(path: Path) -> "Tokenizer":
    """The tokenizer of a model directory, or of a tokenizer.json.

    Raises:
        Refused: not there, or no tokenizer; the library is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise Refused("Python package tokenizers is not installed; run: pip install tokenizers") from error
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise Refused(f"{file}: no such file; give the directory that convert.py wrote")
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing more special
        reason = " ".join(str(error).split())[:120]
        raise Refused(f"{file}: not a tokenizer.json that the tokenizers library reads ({reason})") from error


def text_windows(path: Path, tokenizer: "Tokenizer", tokens: int) -> list[list[int]]:
    """All whole windows of a text.

    Raises:
        Refused: not there, not UTF-8, or shorter than one window.
    """
    if not path.is_file():
        raise Refused(f"{path}: no such file; give a text file")
    try:
        # Bytes, not text mode: line ends stay as they are on every system.
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{path}: not UTF-8 at byte {error.start}; convert it") from error
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not ids:
        raise Refused(f"{path}: is empty; give a text file")
    if len(ids) < tokens:
        raise Refused(f"{path}: has {len(ids)} tokens, fewer than one window of {tokens}; give --tokens {len(ids)} or "
                      "less, or a longer text")  # fmt: skip
    return [ids[start : start + tokens] for start in range(0, len(ids) - tokens + 1, tokens)]


def repeated_windows(text: str, tokenizer: "Tokenizer", tokens: int, sequences: int) -> list[list[int]]:
    """As many windows as wanted, all of one token.

    Raises:
        Refused: the text is not one token.
    """
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) != 1:
        raise Refused(f"--repeat {text!r}: is {len(ids)} tokens {ids[:8]}, expected one; mind the space of ' the'")
    return [ids * tokens] * sequences


def in_turn(pools: Sequence[list[list[int]]]) -> Iterator[list[int]]:
    """One window of each pool after the other, until all are used up."""
    for rank in range(max(map(len, pools))):
        yield from (pool[rank] for pool in pools if rank < len(pool))


def padding_id(given: argparse.Namespace, vocabulary: int) -> int:
    """The token to pad with: --pad-id, or the end-of-text token of the config.json beside the tokenizer.

    Raises:
        Refused: neither says; outside the vocabulary.
    """
    pad = given.pad_id
    if pad is None:
        directory = given.tokenizer if given.tokenizer.is_dir() else given.tokenizer.parent
        try:
            pad = json.loads((directory / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise Refused(f"{directory}: no config.json that names eos_token_id; give --pad-id") from error
    if isinstance(pad, bool) or not isinstance(pad, int) or not 0 <= pad < vocabulary:
        raise Refused(f"padding token {pad} is not one id of the {vocabulary} tokens; give --pad-id")
    return pad


def build(given: argparse.Namespace) -> dict[str, torch.Tensor]:
    """The tensors of the batch file.

    Raises:
        Refused: texts or options that do not fit.
    """
    if bool(given.text) == bool(given.repeat):
        raise Refused("give either text files or --repeat TOKEN")
    for name in ("tokens", "sequences", "step_sequences", "pad"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise Refused(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if given.pad is None and (given.no_mask or given.pad_id is not None):
        raise Refused("--pad-id and --no-mask are about padding; say with --pad how many tokens to add")
    of_step = given.step_sequences or given.sequences
    if given.sequences % of_step:
        raise Refused(f"{given.sequences} sequences are no whole number of steps of {of_step}; choose another "
                      "--sequences or --step-sequences")  # fmt: skip
    tokenizer = open_tokenizer(given.tokenizer)
    if given.text:
        pools = [text_windows(path, tokenizer, given.tokens) for path in given.text]
    else:
        pools = [repeated_windows(text, tokenizer, given.tokens, given.sequences) for text in given.repeat]
    rows = list(in_turn(pools))
    if len(rows) < given.sequences:
        raise Refused(f"the texts hold {len(rows)} windows of {given.tokens} tokens, --sequences asks for "
                      f"{given.sequences}; give more text or fewer")  # fmt: skip
    ids = torch.tensor(rows[: given.sequences], dtype=torch.int64)
    tensors = {"input_ids": ids, "steps": given.first_step + torch.arange(given.sequences) // of_step}
    if given.pad is not None:
        pad = padding_id(given, tokenizer.get_vocab_size())
        padding = ids.new_full((given.sequences, given.pad), pad)
        tensors["input_ids"] = torch.cat((ids, padding), dim=1)
        if given.no_mask:
            tensors["labels"] = torch.cat((ids, torch.full_like(padding, IGNORED_LABEL)), dim=1)
        else:
            tensors["attention_mask"] = torch.cat((torch.ones_like(ids), torch.zeros_like(padding)), dim=1)
    return tensors


def run(given: argparse.Namespace) -> None:
    """Writes the batch file and says what is in it."""
    if given.output.exists() and not given.force:
        raise Refused(f"{given.output}: exists; give another name, or --force to replace it")
    tensors = build(given)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, given.output)
    sequences, length = tensors["input_ids"].shape
    first, last = int(tensors["steps"][0]), int(tensors["steps"][-1])
    of_them = f" ({given.pad} of them padding)" if given.pad else ""
    print(f"{given.output}: {sequences} x {length} tokens{of_them}, steps {first} to {last}, "
          f"{given.output.stat().st_size:,} bytes")  # fmt: skip


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description="Writes recorded batches from plain text.")
    parser.add_argument("text", nargs="*", type=Path, help="UTF-8 text files")
    parser.add_argument("--repeat", action="append", metavar="TOKEN", help="instead of texts: sequences of one token, "
                        "repeated; may be given several times, sequences take them in turn")  # fmt: skip
    parser.add_argument("--tokenizer", type=Path, required=True, help="model directory, or a tokenizer.json")
    parser.add_argument("--tokens", type=int, default=256, metavar="T", help="tokens of a sequence (default: 256)")
    parser.add_argument("--sequences", type=int, default=1, metavar="S", help="sequences in all (default: 1)")
    parser.add_argument("--step-sequences", type=int, metavar="N", help="sequences of one step (default: all)")
    parser.add_argument("--first-step", type=int, default=0, metavar="N", help="number of the first step (default: 0)")
    parser.add_argument("--pad", type=int, metavar="N", help="padding tokens to add at the right of every sequence")
    parser.add_argument("--pad-id", type=int, metavar="ID", help="token to pad with (default: the model's end of text)")
    parser.add_argument("--no-mask", action="store_true", help="leave padding visible, and only its labels ignored")
    parser.add_argument("-o", "--output", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--force", action="store_true", help="replace the output")
    return parser


def main() -> int:
    """Parses the command line; 0 when written, 2 when refused."""
    try:
        run(command_line().parse_args())
    except OSError as error:
        print(
            f"make_batches.py: {error.filename}: {error.strerror}" if error.filename else f"make_batches.py: {error}",
            file=sys.stderr,
        )
        return 2
    except Refused as error:
        print(f"make_batches.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
