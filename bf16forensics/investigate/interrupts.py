"""Keeping Ctrl-C out of the middle of an update, so that what was finished stays whole."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold back an interrupt that arrives inside the block until the block has ended without an error.

    Signals reach the main thread only, so in other threads this does nothing; nor does it where the process ignores
    interrupts or dies of them without a handler.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if arrived:
        handler(*arrived[0])
