"""Follow the log of a run, which no job is asked about."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..training.run.watching import Watched, log_of

_LOOK_S = 0.5


def watch(run: Path, show: Callable[[dict[str, Any]], object] | None) -> dict[str, Any]:
    """What the log of a run tells: as it is, or with ``show``, which gets that whenever it looks, when the run ends or
    its reader does (Ctrl-C). ``quiet_s``: for how long nothing came. Raises EvenloadError."""
    watched, quiet_s = Watched(log_of(run)), 0.0
    watched.read()
    with suppress(KeyboardInterrupt):
        while show is not None and (watched.ends is None or not quiet_s):
            show({**watched.to_json(), "quiet_s": quiet_s})
            time.sleep(_LOOK_S)
            quiet_s = 0.0 if watched.read() else quiet_s + _LOOK_S
    return {**watched.to_json(), "quiet_s": quiet_s}
