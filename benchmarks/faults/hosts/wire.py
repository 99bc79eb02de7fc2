"""Two hosts on this machine: network namespaces, and between them a wire that delays, loses and can be cut.

Each namespace has a TUN device whose packets this process carries to the other one, so no traffic between the hosts
passes by it. Linux, root and /dev/net/tun are needed; what the kernel has of delays (netem) is not.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOSTS = ("node-0", "node-1")
DEVICE = "wire"
_NAMES = Path("/etc/netns")
"""Where `ip netns exec` looks for a namespace's own /etc/hosts."""
_MTU = 9000
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001


@dataclass(frozen=True)
class Quality:
    """How a wire carries a packet: seconds one way, and the share that is lost."""

    delay_s: float = 0.0
    loss: float = 0.0
    is_cut: bool = False


class Wire:
    """The namespaces ``evenload-PID-0`` and ``-1`` while it is entered, joined by `quality`, which may be changed."""

    def __init__(self) -> None:
        self.quality = Quality()
        self.names = tuple(f"evenload-{os.getpid()}-{host}" for host in range(2))
        self._devices: list[int] = []
        self._ended = threading.Event()
        self._carrier = threading.Thread(target=self._carry, daemon=True)

    def __enter__(self) -> Self:
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(ADDRESSES, HOSTS, strict=True))]
        for name, own, other in zip(self.names, ADDRESSES, reversed(ADDRESSES), strict=True):
            _NAMES.joinpath(name).mkdir(parents=True)
            _NAMES.joinpath(name, "hosts").write_text("\n".join(lines) + "\n")
            _ip("netns", "add", name)
            self._devices.append(_device_in(name))
            _ip("-n", name, "addr", "add", own, "peer", other, "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "mtu", str(_MTU), "up")
            _ip("-n", name, "link", "set", "lo", "up")
        self._carrier.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._carrier.join()
        for device in self._devices:
            os.close(device)
        for name in self.names:
            _ip("netns", "del", name)
            shutil.rmtree(_NAMES / name)

    def inside(self, host: int, command: list[str]) -> list[str]:
        """A command that runs another one on a host, under its name."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {HOSTS[host]} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.names[host], *named, *command]

    def _carry(self) -> None:
        draw = random.Random(0)
        late: list[tuple[float, int, int, bytes]] = []
        others = dict(zip(self._devices, reversed(self._devices), strict=True))
        number = 0
        while not self._ended.is_set():
            patience = max(0.0, late[0][0] - time.monotonic()) if late else 0.05
            ready, _, _ = select.select(self._devices, [], [], min(patience, 0.05))
            for device in ready:
                packet, quality = os.read(device, _MTU + 100), self.quality
                if not quality.is_cut and draw.random() >= quality.loss:
                    number += 1
                    heapq.heappush(late, (time.monotonic() + quality.delay_s, number, others[device], packet))
            while late and late[0][0] <= time.monotonic():
                _, _, device, packet = heapq.heappop(late)
                if not self.quality.is_cut:
                    os.write(device, packet)


def _device_in(name: str) -> int:
    """A new TUN device of a namespace; only a thread can go there and leave the process where it is."""
    opened: list[int] = []

    def opening() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        namespace = os.open(f"/run/netns/{name}", os.O_RDONLY)
        if libc.setns(namespace, _CLONE_NEWNET):
            return
        os.close(namespace)
        opened.append(os.open("/dev/net/tun", os.O_RDWR))
        fcntl.ioctl(opened[0], _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _TUN_WITHOUT_HEADER))

    thread = threading.Thread(target=opening)
    thread.start()
    thread.join()
    if not opened:
        raise OSError(f"cannot enter the network namespace {name}")
    return opened[0]


def _ip(*words: str) -> Any:
    return subprocess.run(["ip", *words], check=True, capture_output=True)


def is_possible() -> bool:
    """Whether this machine lets this process make hosts."""
    try:
        with Wire():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
