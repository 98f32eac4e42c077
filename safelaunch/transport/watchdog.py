"""One thread that ends what takes too long.

No timeout of paramiko or of `ssh` covers a whole login, and some calls have none at all. What always frees
them is closing the connection under them from another thread; this is that thread, one for all hosts.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Alarm:
    """A deadline; `fired` says that it passed and its action ran."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self.fired = False
        self.off = False


class Watchdog:
    """Runs actions at their deadlines; they must not block. The thread ends with `close`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._alarms: list[tuple[float, int, Alarm]] = []
        self._order = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextlib.contextmanager
    def limit(self, seconds: float, action: Callable[[], None]) -> Iterator[Alarm]:
        """Run `action` unless the block ends within `seconds`; after the block, `fired` is final."""
        alarm = Alarm(action)
        with self._changed:
            heapq.heappush(self._alarms, (time.monotonic() + seconds, next(self._order), alarm))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="safelaunch-watchdog", daemon=True)
                self._thread.start()
            # Most alarms have the same length, so a new one is rarely the next to go off.
            if self._alarms[0][2] is alarm:
                self._changed.notify()
        try:
            yield alarm
        finally:
            with self._changed:
                alarm.off = True

    def close(self) -> None:
        with self._changed:
            self._closed = True
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                wait = self._alarms[0][0] - time.monotonic() if self._alarms else None
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
                alarm = heapq.heappop(self._alarms)[2]
                if alarm.off:
                    continue
                alarm.fired = True
            alarm.action()
