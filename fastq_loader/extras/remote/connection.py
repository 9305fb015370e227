"""A TCP connection between two machines that carries frames, once both sides have proven to have the token.

Runs on both sides. The handshake proves to each side that the other one has the pool's token, which is never
sent:

    client  MAGIC, a nonce of its own
    server  MAGIC, a nonce of its own, HMAC(token, "server", both nonces)
    client  HMAC(token, "client", both nonces, request), the request
    server  a frame: WELCOME or REPORT

Until then a side stores only the bytes of these lines, whose number is fixed. A frame is a header (kind,
bytes of the payload, bytes of the body), the payload, and the body. A body is a batch, which is received
straight into the receiver's buffers.

A silent side is detected: if nothing comes back for four seconds, the kernel ends the connection. Nothing is
encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

from fastq_loader.errors import ProtocolError

#: The first bytes from both sides; the last one is the version of the handshake and of the frames.
MAGIC = b"FQLr3"
NONCE_BYTES = 32
_MAC_BYTES = 32
_REQUEST = struct.Struct("<?I")

_HEADER = struct.Struct("<BIQ")
#: Kinds of frames: the connection is accepted; a message of `ipc.messages`; the stacks of a far worker.
WELCOME, MESSAGE, REPORT = range(1, 4)
#: Maximum bytes of a payload, by kind. A message contains the values of a batch that are not arrays.
LONGEST = {WELCOME: 1024, MESSAGE: 1 << 30, REPORT: 1 << 20}
#: Maximum bytes of a body, which only a message has. No machine has such a large arena.
LARGEST_BODY = 1 << 46

#: Seconds until a connection is made, and until the other side has sent its part of the handshake.
PATIENCE = 10.0
#: After a second of silence, the kernel sends a probe to the other side every second.
_ASK_AFTER, _ASK_EVERY, _ASKS = 1, 1, 4
#: Milliseconds that sent bytes may remain unacknowledged. The consumer's side sends few, and the other system
#: takes them at once. The kernel checks once a second, so a pulled cable is detected within five. Bytes of a
#: worker may have to wait while the consumer's job is stopped, for example by Ctrl-Z.
NOTICED_HERE, NOTICED_THERE = 4_000, 60_000


class Lost(ConnectionError):
    """The connection has ended or cannot be made; the text contains the reason."""


class Refused(ProtocolError):
    """The other side does not belong to this pool; the text contains the reason."""


class Address(NamedTuple):
    """The address at which a far worker listens."""

    host: str
    port: int


class Frame(NamedTuple):
    """A frame whose body, if it has one, has not been received yet.

    Attributes:
        kind: one of the kinds above.
        payload: its bytes.
        body: number of bytes that follow.
    """

    kind: int
    payload: bytes
    body: int

    @property
    def nbytes(self) -> int:
        """Size of the frame on the wire, in bytes, with its header."""
        return _HEADER.size + len(self.payload) + self.body


class Request(NamedTuple):
    """Request of a client.

    Attributes:
        asks: whether the client requests the far worker's stacks; otherwise it is its proxy.
        worker: number of the far worker in the pool.
    """

    asks: bool
    worker: int = 0


# ---- the handshake ----------------------------------------------------------------------------------


def _mac(token: bytes, *parts: bytes) -> bytes:
    return hmac.new(token, b"".join(parts), hashlib.sha256).digest()


def _check_magic(magic: bytes) -> None:
    if magic != MAGIC:
        raise Refused(f"not this protocol, or another version of it: {magic!r}, and here {MAGIC!r}")


def _check_mac(mac: bytes, token: bytes, *parts: bytes) -> None:
    if not hmac.compare_digest(mac, _mac(token, *parts)):
        raise Refused("wrong token")


def admit(connection: Connection, token: bytes, nonce: bytes) -> Request:
    """The server's side of a handshake; returns the client's request.

    Args:
        connection: to the client.
        token: the pool's.
        nonce: random bytes that were never used before.

    Raises:
        Lost: the connection has ended.
        Refused: the other side does not belong to this pool.
    """
    _check_magic(connection.receive_exactly(len(MAGIC)))
    nonces = connection.receive_exactly(NONCE_BYTES) + nonce
    connection.send_all(MAGIC + nonce + _mac(token, b"server", nonces))
    mac, request = connection.receive_exactly(_MAC_BYTES), connection.receive_exactly(_REQUEST.size)
    _check_mac(mac, token, b"client", nonces, request)
    return Request(*_REQUEST.unpack(request))


def _introduce(connection: Connection, token: bytes, request: Request) -> None:
    """The client's side of a handshake."""
    own_nonce = os.urandom(NONCE_BYTES)
    connection.send_all(MAGIC + own_nonce)
    _check_magic(connection.receive_exactly(len(MAGIC)))
    nonces = own_nonce + connection.receive_exactly(NONCE_BYTES)
    _check_mac(connection.receive_exactly(_MAC_BYTES), token, b"server", nonces)
    packed = _REQUEST.pack(*request)
    connection.send_all(_mac(token, b"client", nonces, packed) + packed)


# ---- sockets ----------------------------------------------------------------------------------------


def listen(host: str, ports: Iterable[int] = (0,)) -> socket.socket:
    """Listen at one address of this machine, and at no other.

    Args:
        host: the address.
        ports: ports that may be used; 0 is any.

    Raises:
        OSError: no port is free, or the address is not this machine's.
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
    """Send small frames without delay, and end the connection after `noticed` milliseconds of silence."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _ASK_AFTER),
        (socket.TCP_KEEPINTVL, _ASK_EVERY),
        (socket.TCP_KEEPCNT, _ASKS),
        (socket.TCP_USER_TIMEOUT, noticed),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Connection:
    """A connection that carries frames. One thread receives and one sends; they may be the same.

    Args:
        sock: connected, and blocking.
        kinds: kinds of frames that the other side may send.
    """

    def __init__(self, sock: socket.socket, *kinds: int) -> None:
        self._socket, self._kinds = sock, kinds
        self.fileno, self.settimeout, self.close = sock.fileno, sock.settimeout, sock.close

    def receive(self) -> Frame:
        """Return the next frame. The caller then receives its body.

        Raises:
            Lost: the connection has ended.
            ProtocolError: the other side violated the protocol.
        """
        kind, payload, body = _HEADER.unpack(self.receive_exactly(_HEADER.size))
        if kind not in self._kinds:
            raise ProtocolError(f"a frame of kind {kind}, which the other side must not send")
        header(kind, payload, body)
        return Frame(kind, self.receive_exactly(payload), body)

    def receive_exactly(self, nbytes: int) -> bytes:
        """Receive exactly `nbytes` bytes.

        Raises:
            Lost: the connection has ended.
        """
        data = bytearray(nbytes)
        self.receive_body(memoryview(data))
        return bytes(data)

    def receive_body(self, buffer: memoryview) -> None:
        """Fill a buffer with bytes of the last frame's body.

        Raises:
            Lost: the connection has ended.
        """
        while buffer:
            try:
                received = self._socket.recv_into(buffer, 0, socket.MSG_WAITALL)
            except OSError as error:
                raise Lost(str(error)) from error
            if not received:
                raise Lost("the other side closed the connection")
            buffer = buffer[received:]

    def send(self, kind: int, payload: bytes, body: Iterable[Any] = ()) -> None:
        """Send a frame; returns when the system has taken all of it.

        Args:
            kind: of the frame.
            payload: its bytes.
            body: buffers, which are sent one after the other.

        Raises:
            Lost: the connection has ended.
            ProtocolError: the frame is larger than the other side accepts.
        """
        parts = [memoryview(part) for part in body]
        self.send_all(header(kind, len(payload), sum(part.nbytes for part in parts)) + payload, *parts)

    def send_all(self, *buffers: Any) -> None:
        """Send bytes as they are.

        Raises:
            Lost: the connection has ended.
        """
        try:
            for buffer in buffers:
                self._socket.sendall(buffer)
        except OSError as error:
            raise Lost(str(error)) from error


def header(kind: int, payload: int, body: int = 0) -> bytes:
    """Encode the header of a frame, from the sizes of its payload and body in bytes.

    Raises:
        ProtocolError: the frame is too large.
    """
    if payload > LONGEST[kind] or body > (LARGEST_BODY if kind == MESSAGE else 0):
        raise ProtocolError(f"a frame of kind {kind} with {payload} bytes and a body of {body} bytes")
    return _HEADER.pack(kind, payload, body)


# ---- to a far worker --------------------------------------------------------------------------------


def connect(
    address: Address,
    token: bytes,
    request: Request,
    *kinds: int,
    patience: float = PATIENCE,
) -> tuple[Connection, Frame]:
    """Connect to a far worker with a request.

    Args:
        address: at which it listens.
        token: the pool's.
        request: of the client.
        kinds: kinds of frames that may be received.
        patience: seconds within which it has to answer.

    Returns:
        The connection, and the first frame, which accepts it.

    Raises:
        Lost: there is no answer in time.
        ProtocolError: the other side does not belong to this pool.
    """
    try:
        sock = socket.create_connection(address, timeout=patience)
    except OSError as error:
        raise Lost(f"{address.host}:{address.port} cannot be reached: {error}") from error
    try:
        configure(sock, NOTICED_HERE)
        connection = Connection(sock, *kinds)
        _introduce(connection, token, request)
        frame = connection.receive()
        connection.settimeout(None)
        return connection, frame
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise Lost(f"{address.host}:{address.port} does not answer: {error}") from error
        raise


def ask_for_stacks(address: Address, token: bytes, patience: float) -> str:
    """Fetch the current Python stacks of a far worker; see `connect`."""
    connection, frame = connect(address, token, Request(True), REPORT, patience=patience)
    connection.close()
    return frame.payload.decode(errors="replace")
