"""Orders of verbs in one process, each verb in a fork of the process that has run those before it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable


def walk(orders: Iterable[str], act: Callable[[str], None], so_far: str = "") -> bool:
    """Whether ``act(verb)`` raises nowhere in any of these orders, which are printed as they end.

    No order sees another; what they begin with alike is run once.
    """
    good, orders = True, list(orders)
    for verb in dict.fromkeys(order[len(so_far)] for order in orders):
        now = so_far + verb
        child = os.fork()
        if child == 0:
            code = 1
            try:
                act(verb)
                longer = [order for order in orders if order.startswith(now) and order != now]
                if now in orders:
                    print(now, flush=True)
                code = int(not walk(longer, act, now))
            except BaseException:
                print(f"failed: {now}", flush=True)
                traceback.print_exc()
            os._exit(code)
        good &= os.waitpid(child, 0)[1] == 0
    return good
