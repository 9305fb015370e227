"""A TCP connection between two machines that carries frames, once both sides have shown the pool's token.

Runs on both sides, and imports neither torch nor numpy. A side that falls silent is noticed here: where
nothing comes back for four seconds, the kernel ends the connection. Where TLS is asked for, each side shows a
certificate, and takes any of the other side's that the authority has signed. Hosts are known by addresses
alone, which change from run to run, so the name in it does not matter.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from fastq_loader.errors import ProtocolError
from fastq_loader.remote import wire
from fastq_loader.remote.wire import Connecting, Frame, Frames, Refused, Request

#: Seconds until a connection is there, and until the other side has said all that it says at first. A host
#: that is busy forks a worker within that time.
PATIENCE = 10.0
#: The kernel asks a side that has said nothing for a second whether it is there, once a second.
_ASK_AFTER, _ASK_EVERY, _ASKS = 1, 1, 4
#: Milliseconds that bytes may wait for an acknowledgement. Those of the consumer's side are few, and the
#: other system takes them as soon as they come. The kernel looks once a second, so a cable that is pulled is
#: noticed within five. A worker's wait while the consumer's job is stopped, by Ctrl-Z perhaps.
NOTICED_HERE, NOTICED_THERE = 4_000, 60_000
#: Buffers of one call; Linux takes 1024.
_AT_ONCE = 512


T = TypeVar("T")


class Address(NamedTuple):
    """Where a host listens."""

    host: str
    port: int


class Lost(ConnectionError):
    """A connection is of no use any more; the text says why."""


def listen(host: str, ports: Iterable[int] = (0,)) -> socket.socket:
    """Listen at one address of this machine, and at no other.

    Args:
        host: the address.
        ports: those that may be used; 0 is any.

    Raises:
        OSError: none of them is free, or the address is not this machine's.
    """
    failure: OSError | None = None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            failure = error
    raise failure or OSError(f"no port to listen at was given for {host}")


def configure(sock: socket.socket, noticed: int) -> None:
    """No delay for small frames, and an end for a side that is silent for `noticed` milliseconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _ASK_AFTER),
        (socket.TCP_KEEPINTVL, _ASK_EVERY),
        (socket.TCP_KEEPCNT, _ASKS),
        (socket.TCP_USER_TIMEOUT, noticed),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


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
    at a time, so nobody waits inside of it. Has the calls of a socket that `Connection` makes.

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


class Connection:
    """A connection after the handshake. One thread receives, and one sends; they may be two.

    Args:
        sock: connected, and blocking.
        kinds: of the frames that the other side may send.
    """

    def __init__(self, sock: socket.socket, *kinds: int) -> None:
        self._socket = Encrypted(sock) if isinstance(sock, ssl.SSLSocket) else sock
        self._frames = Frames(*kinds)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self, block: bool = True) -> Frame | None:
        """The next frame; without `block` None if there is none now. Its body is to be received next.

        Raises:
            Lost: the connection has ended.
            ProtocolError: the other side sent what it must not.
        """
        flags = 0 if block else socket.MSG_DONTWAIT
        while True:
            wanted = self._frames.wanted
            try:
                data = self._socket.recv(wanted, flags)
            except BlockingIOError:
                return None
            except OSError as error:
                raise Lost(str(error)) from error
            if not data:
                raise Lost("the other side closed the connection")
            frame = self._frames.feed(data)
            if frame is not None:
                return frame

    def receive_body(self, into: memoryview) -> None:
        """Receive so many bytes of the body of the last frame.

        Raises:
            Lost: the connection has ended.
        """
        while into:
            try:
                received = self._socket.recv_into(into, 0, socket.MSG_WAITALL)
            except OSError as error:
                raise Lost(str(error)) from error
            if not received:
                raise Lost("the other side closed the connection")
            self._frames.skip(received)
            into = into[received:]

    def send(self, kind: int, payload: bytes, body: Iterable[Any] = ()) -> None:
        """Send a frame; returns when the system has all of it.

        Args:
            kind: see `wire`.
            payload: its bytes.
            body: buffers, one behind the other.

        Raises:
            Lost: the connection has ended.
            ProtocolError: there is more of it than the other side takes.
        """
        parts = [memoryview(part) for part in body]
        head = wire.header(kind, len(payload), sum(part.nbytes for part in parts))
        parts[:0] = [memoryview(head + payload)]
        try:
            while parts:
                sent = self._socket.sendmsg(parts[:_AT_ONCE])
                while parts and sent >= parts[0].nbytes:
                    sent -= parts.pop(0).nbytes
                if sent:
                    parts[0] = parts[0][sent:]
        except OSError as error:
            raise Lost(str(error)) from error

    def settimeout(self, seconds: float | None) -> None:
        """Wait for so long for the other side, at most; None is for ever."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._socket.close()


def connect(
    address: Address,
    token: bytes,
    request: Request,
    *kinds: int,
    tls: Tls | None = None,
    patience: float = PATIENCE,
) -> tuple[Connection, Frame]:
    """Connect to a host, and say what is wanted.

    Args:
        address: where it listens.
        token: the pool's.
        request: what is wanted.
        kinds: of the frames that may come.
        tls: encrypts the connection.
        patience: seconds until it has answered.

    Returns:
        The connection, and the first frame, which says that it may be used.

    Raises:
        Lost: there is nobody, or nobody who answers in time.
        Refused: the other side is no host of this pool, or does not let this one in; the text says why.
    """
    try:
        sock = socket.create_connection(address, timeout=patience)
    except OSError as error:
        raise Lost(f"{address.host}:{address.port} cannot be reached: {error}") from error
    try:
        configure(sock, NOTICED_HERE)
        if tls is not None:
            sock = tls.context(server=False).wrap_socket(sock)
        return _introduce(sock, Connecting(token, os.urandom(wire.NONCE_BYTES), request), kinds)
    except BaseException as error:
        sock.close()
        if isinstance(error, (ProtocolError, Lost)) or not isinstance(error, OSError):
            raise
        raise Lost(f"{address.host}:{address.port} does not answer: {error}") from error


def _introduce(
    sock: socket.socket, handshake: Connecting, kinds: tuple[int, ...]
) -> tuple[Connection, Frame]:
    """The handshake and its answer; see `connect`."""
    sock.sendall(handshake.first)
    while handshake.wanted:
        data = sock.recv(handshake.wanted)
        if not data:
            raise Refused("the other side closed the connection in the middle of the handshake")
        sock.sendall(handshake.feed(data))
    connection = Connection(sock, wire.REFUSED, *kinds)
    frame = connection.receive()
    assert frame is not None, "it was waited for"
    if frame.kind == wire.REFUSED:
        raise Refused(frame.payload.decode(errors="replace"))
    connection.settimeout(None)
    return connection, frame


def ask(address: Address, token: bytes, request: Request, tls: Tls | None, patience: float) -> Any:
    """What a host says about one of its workers; see `host`.

    Raises:
        Lost, Refused: see `connect`.
    """
    connection, frame = connect(address, token, request, wire.REPORT, tls=tls, patience=patience)
    connection.close()
    return wire.unpack(frame.payload)


def ask_refused(address: Address, token: bytes, tls: Tls | None, patience: float) -> int:
    """How many connections a host has refused.

    Raises:
        Lost, Refused: see `connect`.
    """
    report = ask(address, token, Request(0, True), tls, patience)  # no place has this number
    return sum(report["refused"].values())
