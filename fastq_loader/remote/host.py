"""A host: the process on another machine that has the dataset and forks the workers of that machine.

Runs in a program of its own (see `host_process`), on one thread. It opens the user's objects once, listens,
and forks a worker for each connection of a proxy. It keeps an end of each connection, and so it notices at
once when a proxy is gone, and ends its worker whatever that is doing. It says how a worker died, or writes
the stacks of one that hangs, to those who ask with the pool's token.

A worker runs at a place (see `host_process`) and ends with it; the host ends with the last place.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import select
import signal
import socket
import ssl
import struct
import sys
import time
from dataclasses import replace
from typing import NamedTuple

import msgpack
import torch

from fastq_loader.errors import ProtocolError
from fastq_loader.remote import connection, far_worker
from fastq_loader.remote.connection import MESSAGE, REFUSED, REPORT, Connection, Lost, Request, accepting
from fastq_loader.remote.far_worker import HostSpec
from fastq_loader.system import calls
from fastq_loader.workers.children import Child, Stacks
from fastq_loader.workers.payload import Payload

#: Handshakes at a time. Each takes two round trips; more come from a scan of ports.
_HANDSHAKES = 64
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Entry point of a host."""
    places, address, *ports = sys.argv[1:]
    spec: HostSpec = pickle.load(sys.stdin.buffer)
    sys.path += [folder for folder in spec.path if folder not in sys.path]
    torch.set_num_threads(1)  # as in every worker; a pool of threads does not survive a fork
    with contextlib.suppress(Exception):  # each worker finds the same failure, and reports it
        plan = spec.setup.plan
        opened = replace(plan, payload=Payload(*plan.payload.open().values()))
        spec = replace(spec, setup=replace(spec.setup, plan=opened))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its places
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a thread that starts it may keep signals out
    Host(spec, socket.socket(fileno=int(places)), connection.listen(address, map(int, ports))).run()
    os._exit(0)  # what Python does at its end takes longer, and nothing is left to do


class _Handshake:
    """A connection that has not shown the token yet."""

    def __init__(self, sock: socket.socket, token: bytes) -> None:
        self.sock = sock
        self.deadline = time.monotonic() + connection.PATIENCE
        self._side = accepting(token, os.urandom(connection.NONCE_BYTES))
        _, self._wanted = next(self._side)
        self._received = b""

    def hear(self) -> Request:
        """Take what has come, and no more than a line of the handshake; what the client wants, at the end.

        Raises:
            BlockingIOError, ssl.SSLWantReadError: it is not at the end.
            ProtocolError, OSError: the other side does not belong to this pool, or has left.
        """
        while True:
            data = self.sock.recv(self._wanted - len(self._received))
            if not data:
                raise Lost("the other side has left")
            self._received += data
            if len(self._received) == self._wanted:
                try:
                    answer, self._wanted = self._side.send(self._received)
                except StopIteration as end:
                    request: Request = end.value
                    return request
                self._received = b""
                self.sock.send(answer)  # less than 100 bytes, and the first ones


class _Place(NamedTuple):
    """A connection, and variables for the worker that runs as long as it lasts."""

    sock: socket.socket
    environment: dict[str, str]


class _Worker(NamedTuple):
    """A far worker, and this process's end of its connection."""

    child: Child
    sock: socket.socket


class Host:
    """The work of a host.

    Args:
        spec: what it was told.
        places: a local socket where places are given.
        listener: a socket where proxies connect.
    """

    def __init__(self, spec: HostSpec, places: socket.socket, listener: socket.socket) -> None:
        self._spec = spec
        here = far_worker.versions()
        self._different = "" if here == spec.versions else f"it has {here}, and the consumer {spec.versions}"
        self._tls = None if spec.tls is None else spec.tls.context(server=True)
        self._giver = places
        self._listener = listener
        for sock in (places, listener):
            sock.setblocking(False)
            sock.set_inheritable(False)
        self._stacks = Stacks()
        self._given = 0
        self._places: dict[int, _Place] = {}  # by number
        self._handshakes: dict[int, _Handshake] = {}  # by descriptor
        self._workers: dict[int, _Worker] = {}  # by the number of the place
        self._dead: dict[int, tuple[int, str]] = {}  # the same → process id, and how it died

    def run(self) -> None:
        """Serve until the last place is gone."""
        while self._places or not self._given:
            ready = self._wait()
            for number, place in list(self._places.items()):
                if place.sock.fileno() in ready:
                    self._end_place(number)
            for number, worker in list(self._workers.items()):
                if worker.child.descriptor in ready:
                    self._ended(number, worker)
                elif worker.sock.fileno() in ready:  # its proxy is gone
                    worker.child.process.kill()
            for descriptor, handshake in list(self._handshakes.items()):
                if descriptor in ready:
                    self._hear(handshake)
                elif handshake.deadline < time.monotonic():
                    self._refuse(handshake)
            if self._giver.fileno() in ready:
                self._give_place()
            if self._listener.fileno() in ready:
                self._accept()

    def _wait(self) -> set[int]:
        """Actions that are due, by descriptors."""
        poller = select.poll()
        for sock in (self._giver, self._listener, *(place.sock for place in self._places.values())):
            poller.register(sock, select.POLLIN)
        for descriptor in self._handshakes:
            poller.register(descriptor, select.POLLIN)
        for worker in self._workers.values():
            poller.register(worker.child.descriptor, select.POLLIN)
            poller.register(worker.sock, select.POLLRDHUP)
        return {descriptor for descriptor, _ in poller.poll(1000 if self._handshakes else None)}

    # ---- places -------------------------------------------------------------------------------

    def _give_place(self) -> None:
        sock, _ = self._giver.accept()
        self._given += 1
        _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            sock.close()
            return
        with contextlib.suppress(OSError, ValueError), sock.makefile() as file:  # else it is gone already
            environment = json.loads(file.readline())
            sock.send(b"%d %d" % (self._listener.getsockname()[1], self._given))
            self._places[self._given] = _Place(sock, environment)

    def _end_place(self, number: int) -> None:
        self._places.pop(number).sock.close()
        worker = self._workers.pop(number, None)
        if worker is not None:  # why it has ended is known where the place came from
            worker.child.kill()
            self._release(worker)

    # ---- connections --------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the other side has left
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            if self._tls is not None:  # its handshake is a part of the first read
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            if len(self._handshakes) == _HANDSHAKES:
                self._refuse(next(iter(self._handshakes.values())))
            self._handshakes[sock.fileno()] = _Handshake(sock, self._spec.setup.token)

    def _refuse(self, handshake: _Handshake) -> None:
        del self._handshakes[handshake.sock.fileno()]
        handshake.sock.close()

    def _hear(self, handshake: _Handshake) -> None:
        try:
            request = handshake.hear()
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except (ProtocolError, OSError):
            self._refuse(handshake)
        else:
            del self._handshakes[handshake.sock.fileno()]
            self._admit(handshake.sock, request)

    def _admit(self, sock: socket.socket, request: Request) -> None:
        sock.setblocking(True)
        client = Connection(sock, MESSAGE)
        with contextlib.suppress(Lost):  # the other side has left
            connection.configure(sock, connection.NOTICED_THERE)
            if request.asks:
                client.send(REPORT, msgpack.packb(self._report(request.number)))
            elif self._different or request.number not in self._places:
                client.send(REFUSED, (self._different or "its place is gone").encode())
            else:
                self._start_worker(sock, client, request)
                return
        sock.close()

    # ---- workers ------------------------------------------------------------------------------

    def _start_worker(self, sock: socket.socket, client: Connection, request: Request) -> None:
        process = multiprocessing.get_context("fork").Process(
            target=self._work, args=(client, request, os.getpid()), daemon=True
        )
        worker = self._workers[request.number] = _Worker(Child(process), sock)
        try:
            worker.child.start()
        except OSError as error:  # processes, or memory, are used up
            del self._workers[request.number]
            client.send(REFUSED, f"no worker could be started: {error}".encode())
            sock.close()

    def _work(self, client: Connection, request: Request, host: int) -> None:
        """In a worker: close the sockets of the host, and work."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != host:
            return
        mine = self._workers.pop(request.number)
        others = [worker.sock for worker in self._workers.values()]
        others += [handshake.sock for handshake in self._handshakes.values()]
        others += [place.sock for place in self._places.values()]
        for sock in [self._giver, self._listener, *others]:
            sock.close()  # it would keep the connection open
        os.environ.update(self._places[request.number].environment)
        self._workers, self._handshakes, self._places = {request.number: mine}, {}, {}
        far_worker.main(client, self._spec, request, self._stacks.write_end)

    def _ended(self, number: int, worker: _Worker) -> None:
        """A worker has ended. Its proxy sees that when it can ask for the reason, and not before."""
        cause, _ = worker.child.death()
        self._dead[number] = worker.child.pid, cause
        del self._workers[number]
        self._release(worker)

    def _release(self, worker: _Worker) -> None:
        worker.child.release()
        with contextlib.suppress(OSError):  # the proxy is gone
            worker.sock.shutdown(socket.SHUT_RDWR)  # a child of the worker may hold the connection, too
        worker.sock.close()

    def _report(self, number: int) -> tuple[int, bool, str]:
        """Of a worker: its process id, whether it is alive, and its stacks or how it died; 0 if it is not
        known, or ended with its place."""
        worker = self._workers.get(number)
        if worker is not None and not calls.readable([worker.child.descriptor], 0):
            return worker.child.pid, True, self._stacks.of(worker.child.pid)
        if worker is not None:
            self._ended(number, worker)
        pid, text = self._dead.get(number, (0, ""))
        return pid, False, text
