"""What goes over a connection between two machines: a handshake, then frames.

Pure: bytes in, events out; however the bytes are cut, the events are the same. Runs on both sides.

The handshake shows each side that the other has the pool's token, which is never sent:

    client  MAGIC, a nonce of its own
    server  MAGIC, a nonce of its own, HMAC(token, "server", both nonces)
    client  HMAC(token, "client", both nonces, request), the request's length, the request
    server  a frame: WELCOME or REFUSED

Before that a side keeps no more than the bytes of these lines, and reads nothing of what they say but sizes.
A frame is a header (kind, bytes of the payload, bytes of the body), the payload, and the body. Bodies are
batches; they are not kept here, because they belong where the receiver wants them.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Generator
from typing import Any, NamedTuple

import msgpack

from fastq_loader.errors import ProtocolError

#: The first bytes of both sides; the last one is the version of the handshake and of the frames.
MAGIC = b"FQLr1"
NONCE_BYTES = 32
_MAC_BYTES = 32
_LENGTH = struct.Struct("<H")
#: Bytes of a request: numbers and names of devices.
LONGEST_REQUEST = 1024

_HEADER = struct.Struct("<BIQ")
#: Kinds of frames: the connection may be used; it may not, and why; a message of `ipc.messages`; what was
#: asked for.
WELCOME, REFUSED, MESSAGE, REPORT = range(1, 5)
#: Bytes of a payload, by kind. A message has the values of a batch in it that are no arrays.
LONGEST = {WELCOME: 1024, REFUSED: 1024, MESSAGE: 1 << 30, REPORT: 1 << 20}
#: Bytes of a body, which only a message has. No machine has an arena as large as that.
LARGEST_BODY = 1 << 46
_AT_ONCE = 1 << 18


class Refused(ProtocolError):
    """The other side does not get in.

    Args:
        reason: in a few words, the same for all of its kind, so that they can be counted.
    """


class Frame(NamedTuple):
    """A frame whose body is still to come, if there is one.

    Attributes:
        kind: one of the kinds above.
        payload: its bytes.
        body: how many bytes follow.
    """

    kind: int
    payload: bytes
    body: int

    @property
    def nbytes(self) -> int:
        """Bytes that it has on the wire, with its header."""
        return _HEADER.size + len(self.payload) + self.body


class Request(NamedTuple):
    """What a client wants.

    Attributes:
        number: of the place that it was given; names the far worker.
        asks: it asks what became of that worker; else it is its stand-in, and the worker is to be started.
        worker: the worker's number in the pool.
        environment: variables for the worker, which say what devices it may use.
    """

    number: int
    asks: bool
    worker: int = 0
    environment: dict[str, str] = {}  # noqa: RUF012 - nobody writes to it

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(tuple(self))
        assert len(packed) <= LONGEST_REQUEST, "it is made of numbers and names of devices"
        return packed


def read_request(packed: bytes) -> Request:
    """
    Raises:
        Refused: these bytes are no request.
    """
    try:  # whoever has made them has the token
        return Request(*msgpack.unpackb(packed))
    except (ValueError, TypeError, msgpack.UnpackException):
        raise Refused("a request that cannot be read") from None


def difference(here: dict[str, str], there: dict[str, str]) -> str:
    """What is not the same on both sides, in words; "" if nothing is."""
    return ", ".join(
        f"{name} {here.get(name, '(none)')} here and {there.get(name, '(none)')} there"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    )


def _mac(token: bytes, *parts: bytes) -> bytes:
    return hmac.new(token, b"".join(parts), hashlib.sha256).digest()


#: What one side does: it takes what it wanted, and gives what is to be sent and how many bytes it wants next.
_Steps = Generator[tuple[bytes, int], bytes, None]


class _Handshake:
    """One side. `feed` takes what was received and returns what is to be sent.

    Args:
        token: the pool's.
        nonce: random bytes that were never used before.

    Attributes:
        first: what is to be sent before anything is received.
        wanted: bytes to receive before anything can be said; no others may be given to `feed`. 0: it is over.
    """

    def __init__(self, token: bytes, nonce: bytes) -> None:
        assert len(nonce) == NONCE_BYTES, "both sides send as many"
        self._token = token
        self._nonce = nonce
        self._received = b""
        self._steps = self._begin()
        self.first, self.wanted = next(self._steps)

    def feed(self, data: bytes) -> bytes:
        """
        Raises:
            Refused: the other side is not one of this pool.
        """
        assert len(data) <= self.wanted, "more was received than asked for"
        self._received += data
        self.wanted -= len(data)
        if self.wanted:
            return b""
        received, self._received = self._received, b""
        said, self.wanted = self._steps.send(received)
        return said

    def _begin(self) -> _Steps:
        raise NotImplementedError

    def _check_magic(self, magic: bytes) -> None:
        if magic != MAGIC:
            raise Refused("not this protocol")

    def _check_mac(self, mac: bytes, *parts: bytes) -> None:
        if not hmac.compare_digest(mac, _mac(self._token, *parts)):
            raise Refused("wrong token")


class Accepting(_Handshake):
    """The server's side.

    Attributes:
        request: what the client wants, when it is over.
    """

    request: Request | None = None

    def _begin(self) -> _Steps:
        self._check_magic((yield b"", len(MAGIC)))
        nonces = (yield b"", NONCE_BYTES) + self._nonce
        mine = MAGIC + self._nonce + _mac(self._token, b"server", nonces)
        proof = yield mine, _MAC_BYTES + _LENGTH.size
        (length,) = _LENGTH.unpack(proof[_MAC_BYTES:])
        if not 0 < length <= LONGEST_REQUEST:
            raise Refused("a request of a forged size")
        request = yield b"", length
        self._check_mac(proof[:_MAC_BYTES], b"client", nonces, request)
        self.request = read_request(request)
        yield b"", 0


class Connecting(_Handshake):
    """The client's side. Over when it has said what it wants; the answer is a frame.

    Args:
        token, nonce: see above.
        request: what it wants.
    """

    def __init__(self, token: bytes, nonce: bytes, request: Request) -> None:
        super().__init__(token, nonce)
        self._request = request.pack()

    def _begin(self) -> _Steps:
        self._check_magic((yield MAGIC + self._nonce, len(MAGIC)))
        proof = yield b"", NONCE_BYTES + _MAC_BYTES
        nonces = self._nonce + proof[:NONCE_BYTES]
        self._check_mac(proof[NONCE_BYTES:], b"server", nonces)
        mac = _mac(self._token, b"client", nonces, self._request)
        yield mac + _LENGTH.pack(len(self._request)) + self._request, 0


def header(kind: int, payload: int, body: int = 0) -> bytes:
    """The first bytes of a frame; its payload has as many bytes, and its body.

    Raises:
        ProtocolError: the other side would not take as many.
    """
    _check_sizes(kind, payload, body)
    return _HEADER.pack(kind, payload, body)


def _check_sizes(kind: int, payload: int, body: int) -> None:
    if payload > LONGEST[kind] or body > (LARGEST_BODY if kind == MESSAGE else 0):
        raise ProtocolError(f"a frame of kind {kind} with {payload} bytes and a body of {body} bytes")


class Frames:
    """Bytes become frames, after the handshake.

    Args:
        kinds: those that the other side may send.

    Attributes:
        body: bytes of a body that are still to come. They are received elsewhere, and counted by `skip`.
    """

    def __init__(self, *kinds: int) -> None:
        self.body = 0
        self._kinds = kinds
        self._received = bytearray()
        self._head: tuple[int, int, int] | None = None

    @property
    def wanted(self) -> int:
        """Bytes to receive next, at most: none of them are of a body, or of another frame."""
        missing = (_HEADER.size if self._head is None else self._head[1]) - len(self._received)
        return 0 if self.body else min(missing, _AT_ONCE)

    def skip(self, nbytes: int) -> None:
        """So many bytes of the body were received."""
        assert nbytes <= self.body, "more was received than the body has"
        self.body -= nbytes

    def feed(self, data: bytes) -> Frame | None:
        """The frame, when its head is there.

        Raises:
            ProtocolError: it is of a kind, or of a size, that the other side must not send.
        """
        assert len(data) <= self.wanted, "more was received than asked for"
        self._received += data
        if self._head is None:
            if len(self._received) < _HEADER.size:
                return None
            kind, payload, body = _HEADER.unpack(self._received)
            if kind not in self._kinds:
                raise ProtocolError(f"a frame of kind {kind}, which the other side must not send")
            _check_sizes(kind, payload, body)
            self._head = kind, payload, body
            self._received.clear()
        kind, payload, body = self._head
        if len(self._received) < payload:
            return None
        frame = Frame(kind, bytes(self._received), body)
        self._received, self._head, self.body = bytearray(), None, body
        return frame


def unpack(payload: bytes) -> Any:
    """What `msgpack.packb` made.

    Raises:
        ProtocolError: it did not make these bytes.
    """
    try:
        return msgpack.unpackb(payload)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a msgpack frame: {error}") from error
