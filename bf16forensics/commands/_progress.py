"""A progress bar on standard error for runs that take a while: on a terminal only."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds before a progress bar appears.
_QUIET_S = 1.0


@contextmanager
def sequence_bar(planned: int) -> Iterator[Callable[[int], None]]:
    """Shows how many sequences are done while the body runs.

    Args:
        planned: sequences in all.

    Returns:
        A function to call with the number of sequences done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("sequences"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    started = time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("sequences", total=planned, visible=False)

        def show(done: int) -> None:
            bar.update(task, completed=done, visible=time.perf_counter() - started > _QUIET_S)

        yield show
