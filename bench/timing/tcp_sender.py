"""The other side of a bare `recv_into`: sends the same bytes again and again, to one connection at a time.

A program of its own (`python -m bench.timing.tcp_sender BYTES`), which prints the port that it
listens at, and ends with its standard input. Imports the standard library alone, so that it is there at once.
"""

from __future__ import annotations

import select
import socket
import sys
from contextlib import suppress


def main() -> None:
    size = int(sys.argv[1])
    batch = memoryview(bytes(range(256)) * (size // 256 + 1))[:size]
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            with connection, suppress(BrokenPipeError, ConnectionResetError):
                while True:
                    connection.sendall(batch)


if __name__ == "__main__":
    main()
