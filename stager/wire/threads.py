"""Start threads whose unexpected failure ends the rank."""

from __future__ import annotations

import os
import threading
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def start_thread(run: Callable[[], None]) -> threading.Thread:
    """Start and return a thread that calls ``run``.

    An exception in it ends the process with code 1: the other ranks would wait for this one
    forever, and a process that dies is one that the launcher notices.
    """

    def run_or_exit() -> None:
        try:
            run()
        except BaseException:
            os.write(2, traceback.format_exc().encode(errors="replace"))
            os._exit(1)

    # A daemon: a rank that ends by an error does not wait for its threads.
    thread = threading.Thread(target=run_or_exit, daemon=True)
    thread.start()
    return thread
