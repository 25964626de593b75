"""How ranks learn at once that one of them is gone, and which was the first."""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from dsclr.interruption import INTERRUPTED, Interruption, end_process
from dsclr.train.runtime import Runtime

logger = logging.getLogger(__name__)

# For the main thread to come out of a collective by itself; NCCL's may not return.
GRACE_SECONDS = 10.0
# For news of another rank's death, which may arrive a little later than the broken collective it causes.
NEWS_SECONDS = 1.5
CONNECT_SECONDS = 30.0


class Lifeline:
    """A TCP connection of every rank to rank 0: the system closes it when a process dies, however it dies.

    Rank 0 decides which rank was the first to go and tells all; they end within GRACE_SECONDS, whatever they wait
    for. A request to end (see :class:`Interruption`) that reached one rank is passed on to all. A machine that
    falls silent is noticed by TCP's keep-alive within half a minute.

    Args:
        runtime: of this process; all ranks make their lifeline together. One rank alone needs none, and has none.
        interruption: of this process.
    """

    def __init__(self, runtime: Runtime, interruption: Interruption) -> None:
        self.rank = runtime.rank
        self.interruption = interruption
        # (rank, exit status) of the first to go.
        self.first: tuple[int, int] | None = None
        self._news = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        self._peers: dict[int, socket.socket] = {}
        if runtime.world_size == 1:
            return
        if runtime.is_main:
            self._accept(runtime.world_size)
        else:
            self._connect()
        interruption.tell = self._tell_stop
        if interruption.requested:
            self._tell_stop()
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    def first_to_fail(self) -> bool:
        """Say that this rank ends with an error; whether it is the first one to go."""
        if not self._peers:
            return True
        if self._news.wait(NEWS_SECONDS):
            return False
        if self.rank == 0:
            self._went(0, 1)
        else:
            self._send(0, {"failed": True})
            self._news.wait(NEWS_SECONDS)
        return self.first is None or self.first[0] == self.rank

    def close(self) -> None:
        """Say that this rank ends as it should."""
        with self._lock:
            self._closed = True
        for peer in list(self._peers):
            self._send(peer, {"bye": True})

    def _accept(self, world_size: int) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=world_size)
        token = secrets.token_hex(16)
        dist.broadcast_object_list([server.getsockname()[1], token])
        until = time.monotonic() + CONNECT_SECONDS
        with server:
            while len(self._peers) < world_size - 1:
                server.settimeout(max(0.1, until - time.monotonic()))
                connection, _ = server.accept()
                connection.settimeout(CONNECT_SECONDS)
                # Of fixed length, so that nothing of what follows is read along.
                hello = connection.recv(len(token) + 8, socket.MSG_WAITALL).decode(errors="replace")
                if hello.startswith(token):
                    self._adopt(int(hello[len(token) :]), connection)
                else:
                    connection.close()

    def _connect(self) -> None:
        address: list[Any] = [None, None]
        dist.broadcast_object_list(address)
        connection = socket.create_connection((os.environ["MASTER_ADDR"], address[0]), CONNECT_SECONDS)
        connection.sendall(f"{address[1]}{self.rank:08d}".encode())
        self._adopt(0, connection)

    def _adopt(self, peer: int, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, option):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._peers[peer] = connection

    def _send(self, peer: int, message: dict[str, Any]) -> None:
        try:
            self._peers[peer].sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # gone: the listener notices
            logger.debug("rank %d cannot be told %s", peer, message)

    def _tell_stop(self) -> None:
        for peer in list(self._peers):
            self._send(peer, {"stop": self.interruption.reason})

    def _listen(self) -> None:
        left = dict.fromkeys(self._peers, False)
        asked_to_stop: set[int] = set()
        for peer, message in _messages(self._peers):
            if message is None:
                if not left[peer]:
                    self._went(peer, INTERRUPTED if peer in asked_to_stop else 1, silent=peer not in asked_to_stop)
            elif "bye" in message:
                left[peer] = True
            elif "failed" in message:
                left[peer] = True
                self._went(peer, 1)
            elif "first" in message:
                if self._is_first(*message["first"]):
                    self._hear(*message["first"])
            elif "stop" in message:
                asked_to_stop.add(peer)
                # Rank 0 passes it on by Interruption.tell.
                self.interruption.request(message["stop"])

    def _went(self, peer: int, status: int, silent: bool = False) -> None:
        if not self._is_first(peer, status):
            return
        # Nobody else will say it, and one rank is enough to.
        if silent and self.rank == (1 if peer == 0 else 0):
            logger.error("error: rank %d is gone without a word (killed, or its machine ran out of memory)", peer)
        if self.rank == 0:
            # Before this process hears of it, which ends it.
            for other in list(self._peers):
                self._send(other, {"first": self.first})
        self._hear(peer, status)

    def _is_first(self, peer: int, status: int) -> bool:
        with self._lock:
            if self._closed or self.first is not None:
                return False
            self.first = (peer, status)
            return True

    def _hear(self, peer: int, status: int) -> None:
        self._news.set()
        if peer != self.rank:
            threading.Thread(target=self._end_with, args=(peer, status), name="lifeline-end", daemon=True).start()

    def _end_with(self, peer: int, status: int) -> None:
        time.sleep(GRACE_SECONDS)
        logger.error("rank %d ends, since rank %d is gone", self.rank, peer)
        end_process(status)


def _messages(peers: dict[int, socket.socket]) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """What peers say, as it comes; None when one has gone. Ends with the last."""
    selector = selectors.DefaultSelector()
    rest = dict.fromkeys(peers, b"")
    for peer, connection in peers.items():
        selector.register(connection, selectors.EVENT_READ, peer)
    while selector.get_map():
        for key, _ in selector.select():
            peer, connection = key.data, peers[key.data]
            try:
                data = connection.recv(4096)
            except OSError:
                data = b""
            *lines, rest[peer] = (rest[peer] + data).split(b"\n")
            for line in lines:
                yield peer, json.loads(line)
            if not data:
                selector.unregister(connection)
                yield peer, None
