"""TLS for connections between machines, where it is asked for.

Runs on both sides. Each side shows a certificate, and takes any of the other side's that the authority has
signed. Hosts are known by addresses alone, which change from run to run, so the name in it does not matter.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Tls(NamedTuple):
    """Files in PEM format, on each machine.

    Attributes:
        certificate: what this side shows.
        key: of the certificate.
        authority: the certificate of whoever has signed those of both sides.
    """

    certificate: str
    key: str
    authority: str

    def context(self, server: bool) -> ssl.SSLContext:
        """
        Raises:
            OSError: a file is not there, or not what it should be.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        if server:
            context.num_tickets = 0  # nobody connects twice, and what is readable is a frame
        return context


class Encrypted:
    """A connected socket that one thread may receive from while another one sends. OpenSSL takes one thread
    at a time, so nobody waits inside of it. Has the calls of a socket that `link.Connection` makes.

    Args:
        sock: after the handshake of TLS.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._seconds = sock.gettimeout()
        sock.setblocking(False)
        self._socket = sock
        self._lock = threading.Lock()
        self.fileno = sock.fileno
        self.close = sock.close

    def settimeout(self, seconds: float | None) -> None:
        self._seconds = seconds

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        return self._do(partial(self._socket.recv, nbytes), flags != socket.MSG_DONTWAIT)

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        return self._do(partial(self._socket.recv_into, buffer))

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        return self._do(partial(self._socket.send, buffers[0]))

    def _do(self, call: Callable[[], T], block: bool = True) -> T:
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            if not block:
                raise BlockingIOError
            poller = select.poll()
            poller.register(self._socket, event)
            if not poller.poll(None if self._seconds is None else self._seconds * 1000):
                raise TimeoutError("timed out")
