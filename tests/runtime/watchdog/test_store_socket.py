"""The port of a store cannot be lost between the launcher and rank 0."""

import datetime
import os
import socket

import pytest
from evenload.runtime.watchdog.store_socket import STORE_SOCKET, bound, inherited
from torch.distributed import TCPStore

SOON = datetime.timedelta(seconds=20)


def test_the_port_is_held_refuses_until_the_store_opens_and_then_serves(monkeypatch):
    with bound() as held:
        port = held.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        monkeypatch.setenv(STORE_SOCKET, str(os.dup(held.fileno())))
        store = TCPStore("127.0.0.1", port, 2, True, SOON, wait_for_workers=False, master_listen_fd=inherited(True))
    client = TCPStore("127.0.0.1", port, 2, False, SOON, wait_for_workers=False)
    client.set("key", "value")
    assert store.get("key") == b"value"
    assert STORE_SOCKET not in os.environ
    assert inherited(True) is None


def test_a_store_that_cannot_take_the_socket_gets_its_port_free(monkeypatch):
    with bound() as held:
        port = held.getsockname()[1]
        monkeypatch.setenv(STORE_SOCKET, str(os.dup(held.fileno())))
    assert inherited(use_libuv=False) is None
    with socket.create_server(("127.0.0.1", port)):
        pass
