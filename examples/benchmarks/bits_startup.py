"""What starting `bits` costs beside starting Python and importing the command-line library.

    python examples/benchmarks/bits_startup.py [--repeats N]

Four fresh processes in turn, N times each: `python -c pass`, `python -c "import typer"`, the smallest program that the
library can run (building a command imports more of it than the import does), and `bits` on the published event.
Medians of the wall time; the ratios are to the second. Nothing is printed unless `bits` gives the published result,
and unless its process imports neither torch nor NumPy.
"""

import argparse
import statistics
import subprocess
import sys
import time

#: arXiv 2510.04212, section 3.3.2.
EVENT = ("0xC01A0E2E", "0xC0130000")
EXPECTED = ("1100000010010111", "-0.014759540557861328")
HEAVY = ("torch", "triton", "numpy", "scipy", "safetensors")

_BITS = "import sys; from bf16forensics.__main__ import main; sys.exit(main(['bits', *sys.argv[1:]]))"
_SMALLEST = "import typer; app = typer.Typer(); app.command()(lambda: None); app(args=[], standalone_mode=False)"
_CHECK = (
    "import sys; from bf16forensics.__main__ import main; code = main(['bits', *sys.argv[1:]]); "
    f"found = sorted(set({HEAVY!r}) & set(sys.modules)); print(found, file=sys.stderr); sys.exit(code)"
)


def seconds(code: str, *arguments: str) -> float:
    """Wall time of one process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def check() -> str | None:
    """What is wrong with the result; None when nothing is."""
    done = subprocess.run([sys.executable, "-c", _CHECK, *EVENT], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"bits ended with {done.returncode}: {done.stderr.strip()}"
    missing = [text for text in EXPECTED if text not in done.stdout]
    if missing:
        return f"the published event came out without {', '.join(missing)}"
    loaded = done.stderr.strip().splitlines()[-1]
    return None if loaded == "[]" else f"bits imported {loaded}"


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Start-up of bits against Python and typer.")
    parser.add_argument("--repeats", type=int, default=15)
    repeats = max(parser.parse_args().repeats, 1)
    wrong = check()
    if wrong is not None:
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    runs = {"pass": ("pass",), "typer": ("import typer",), "smallest": (_SMALLEST,), "bits": (_BITS, *EVENT)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, command in runs.items():
            times[name].append(seconds(*command))
    medians = {name: statistics.median(found) for name, found in times.items()}
    print(f"python -c 'import typer': 1 (median of {repeats}: {medians['typer'] * 1e3:.0f} ms)")
    print(f"python -c pass: {medians['pass'] / medians['typer']:.2f}x")
    print(f"smallest program with typer: {medians['smallest'] / medians['typer']:.2f}x")
    print(f"bits on two patterns: {medians['bits'] / medians['typer']:.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
