"""A host: the process on another machine that has the dataset and forks the workers of that machine.

Runs in a program of its own (see `host_process`), on one thread. It opens the user's objects once, listens,
and forks a worker for each connection of a stand-in. It keeps an end of each connection, and so it notices
at once when a stand-in is gone, and ends its worker whatever that is doing. It says how a worker died, or
writes the stacks of one that hangs, to whoever asks with the pool's token.

It lives as long as its standard input is open on the other end. Its workers die with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import select
import signal
import socket
import ssl
import sys
import time
from collections import Counter
from typing import Any

import msgpack
import torch

from fastq_loader.remote import far_worker, link, wire
from fastq_loader.remote.link import Connection, Lost
from fastq_loader.remote.spec import HostSpec, versions
from fastq_loader.remote.wire import Accepting, Refused, Request
from fastq_loader.system import calls
from fastq_loader.workers.children import Child
from fastq_loader.workers.stack_dumps import Stacks

#: Handshakes at a time. Each takes two round trips; more come from a scan of ports.
_HANDSHAKES = 64
#: Dead workers that somebody may still ask about.
_REMEMBERED = 1000
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Entry point of a host."""
    told, address, *ports = sys.argv[1:]
    with open(int(told), "rb") as file:
        file.seek(0)  # whoever wrote it has left it at the end
        spec: HostSpec = pickle.load(file)
    sys.path += [folder for folder in spec.path if folder not in sys.path]
    torch.set_num_threads(1)  # as in every worker; a pool of threads does not survive a fork
    with contextlib.suppress(Exception):  # each worker finds the same failure, and reports it
        spec.plan.payload.open()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when whoever started it does
    serving = Serving(spec, link.listen(address, map(int, ports)))
    with contextlib.suppress(BrokenPipeError):  # nobody needs it any more: `run` finds that, too
        print(serving.port, flush=True)
    os.dup2(2, 1)  # what workers print is for whoever reads this machine's log
    serving.run(lifeline=0)
    os._exit(0)  # what Python does at its end takes longer, and nothing is left to do


class _Guest:
    """A connection that has not shown the token yet."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        self.sock = sock
        self.handshake = Accepting(token, os.urandom(wire.NONCE_BYTES))
        self.deadline = time.monotonic() + link.PATIENCE


class _Worker:
    """A far worker, and this process's end of its connection."""

    def __init__(self, child: Child, sock: socket.socket) -> None:
        self.child = child
        self.sock = sock


class Serving:
    """The work of a host.

    Args:
        spec: what it was told.
        listener: a socket that listens.

    Attributes:
        port: where it listens.
        refused: how many connections were refused, by the reason.
    """

    def __init__(self, spec: HostSpec, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self.refused: Counter[str] = Counter()
        self._spec = spec
        self._different = wire.difference(versions(), spec.versions)
        self._tls = None if spec.tls is None else spec.tls.context(server=True)
        self._listener = listener
        self._listener.setblocking(False)
        self._stacks = Stacks()
        self._guests: dict[int, _Guest] = {}  # by descriptor
        self._workers: dict[int, _Worker] = {}  # by the number of the place
        self._dead: dict[int, dict[str, Any]] = {}  # the same → what is reported of it

    def run(self, lifeline: int) -> None:
        """Serve until the other end of the lifeline is closed."""
        while lifeline not in (ready := self._wait(lifeline)):
            for number, worker in list(self._workers.items()):
                if worker.child.descriptor in ready:
                    self._bury(number, worker)
                elif worker.sock.fileno() in ready:  # its stand-in is gone
                    worker.child.process.kill()
            for descriptor, guest in list(self._guests.items()):
                if descriptor in ready:
                    self._hear(guest)
                elif guest.deadline < time.monotonic():
                    self._refuse(guest, "said nothing in time")
            if self._listener.fileno() in ready:
                self._accept()
        for worker in self._workers.values():
            worker.child.kill()
            worker.child.release()

    def _wait(self, lifeline: int) -> set[int]:
        """What there is to do, by descriptors."""
        poller = select.poll()
        for descriptor in (lifeline, self._listener.fileno(), *self._guests):
            poller.register(descriptor, select.POLLIN)
        for worker in self._workers.values():
            poller.register(worker.child.descriptor, select.POLLIN)
            poller.register(worker.sock, select.POLLRDHUP)
        return {descriptor for descriptor, _ in poller.poll(1000 if self._guests else None)}

    # ---- who gets in --------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # whoever it was has left
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            if self._tls is not None:  # its handshake is a part of the first read
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            if len(self._guests) == _HANDSHAKES:
                self._refuse(next(iter(self._guests.values())), "too many at once")
            self._guests[sock.fileno()] = _Guest(sock, self._spec.token)

    def _refuse(self, guest: _Guest, reason: str) -> None:
        self.refused[reason] += 1
        self._guests.pop(guest.sock.fileno(), None)
        guest.sock.close()

    def _hear(self, guest: _Guest) -> None:
        """What a guest says. As long as it may say anything, no more is read than a line of the handshake."""
        handshake = guest.handshake
        try:
            while handshake.request is None:
                data = guest.sock.recv(handshake.wanted)
                if not data:
                    raise Refused("left in the middle of the handshake")
                if answer := handshake.feed(data):  # less than 100 bytes, and the first ones
                    guest.sock.send(answer)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except Refused as error:
            self._refuse(guest, str(error))
        except ssl.SSLError:
            self._refuse(guest, "no TLS, or no certificate of the authority")
        except OSError:
            self._refuse(guest, "left in the middle of the handshake")
        else:
            self._admit(guest, handshake.request)

    def _admit(self, guest: _Guest, request: Request) -> None:
        del self._guests[guest.sock.fileno()]
        guest.sock.setblocking(True)
        connection = Connection(guest.sock, wire.MESSAGE)
        with contextlib.suppress(Lost):  # whoever it was has left
            link.configure(guest.sock, link.NOTICED_THERE)
            if request.asks:
                connection.send(wire.REPORT, msgpack.packb(self._report(request.number)))
            elif self._different:
                self.refused["another version"] += 1
                connection.send(wire.REFUSED, self._different.encode())
            else:
                self._start_worker(guest.sock, connection, request)
                return
        guest.sock.close()

    # ---- workers ------------------------------------------------------------------------------

    def _start_worker(self, sock: socket.socket, connection: Connection, request: Request) -> None:
        process = multiprocessing.get_context("fork").Process(
            target=self._work, args=(connection, request, os.getpid()), daemon=True
        )
        worker = self._workers[request.number] = _Worker(Child(process), sock)
        try:
            worker.child.start()
        except OSError as error:  # processes, or memory, are used up
            del self._workers[request.number]
            connection.send(wire.REFUSED, f"no worker could be started: {error}".encode())
            sock.close()

    def _work(self, connection: Connection, request: Request, host: int) -> None:
        """In a worker: leave what is the host's behind, and work."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != host:
            return
        mine = self._workers.pop(request.number)
        others = [worker.sock for worker in self._workers.values()]
        for sock in [self._listener, *others, *(guest.sock for guest in self._guests.values())]:
            sock.close()  # it would keep the connection open
        self._workers, self._guests = {request.number: mine}, {}
        os.environ.update(request.environment)
        far_worker.main(connection, self._spec, request, self._stacks.write_end)

    def _bury(self, number: int, worker: _Worker) -> None:
        """A worker has ended. Its stand-in sees that when it can ask for the reason, and not before."""
        pid, (cause, _) = worker.child.pid, worker.child.death()
        self._dead[number] = {"pid": pid, "text": cause}
        if len(self._dead) > _REMEMBERED:
            del self._dead[next(iter(self._dead))]
        del self._workers[number]
        worker.child.release()
        with contextlib.suppress(OSError):  # the stand-in is gone
            worker.sock.shutdown(socket.SHUT_RDWR)  # a child of the worker may hold the connection, too
        worker.sock.close()

    def _report(self, number: int) -> dict[str, Any]:
        """Of a worker: `pid`, `alive`, and as `text` its stacks or how it died. And who was `refused`."""
        report: dict[str, Any] = {"pid": 0, "alive": False, "text": "", "refused": dict(self.refused)}
        worker = self._workers.get(number)
        if worker is not None and not calls.readable([worker.child.descriptor], 0):
            pid = worker.child.pid
            return {**report, "pid": pid, "alive": True, "text": self._stacks.of(pid)}
        if worker is not None:
            self._bury(number, worker)
        return {**report, **self._dead.get(number, {})}
