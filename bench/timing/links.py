"""Links of a known rate: for each a network namespace of its own, and a cable to it that is limited on the
far side (tc's token bucket).

The namespace is that of a process that ends with this one, so nothing is left behind, whatever happens. Needs
root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from bench.peers import Unsupported
from fastq_loader.remote.control import Place
from fastq_loader.remote.host_process import Host
from fastq_loader.remote.placement import Placement, Ready

TOOLS = ("ip", "tc", "unshare", "nsenter")
RATE = 10**9  # bits per second
# The bucket counts a frame with its Ethernet header (14 bytes) and not what a cable adds (24 bytes). IP and
# TCP have 52 bytes of header with time stamps.
FRAME, HEADERS, MTU = 1514, 52, 1500
PAYLOAD = RATE / 8 * (MTU - HEADERS) / FRAME
"""Bytes per second of a stream that fill such a link: 119.6 million."""
BUCKET = ("burst", "256kb", "latency", "50ms")
_CLONE_NEWNET = 0x40000000  # <sched.h>


class Link(NamedTuple):
    """A machine at the end of a cable.

    Attributes:
        address: of the machine.
        namespace: the file of its network.
    """

    address: str
    namespace: str

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What this thread starts in here runs on that machine, as far as its network goes."""
        with open("/proc/thread-self/ns/net") as here, open(self.namespace) as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(here.fileno())


def missing() -> str:
    """What limited links need and is not there; "" for nothing."""
    if os.geteuid():
        return "root, for network namespaces with limited links"
    return ", ".join(tool for tool in TOOLS if not shutil.which(tool))


@contextmanager
def limited_links(count: int) -> Iterator[list[Link]]:
    """So many machines, each with a link of its own to this one.

    Raises:
        Unsupported: this system does not let us, with what it said.
    """
    with ExitStack() as around:
        yield [_link(number, around) for number in range(count)]


def _link(number: int, around: ExitStack) -> Link:
    # 198.18.0.0/15 is for benchmarks (RFC 2544): nobody else's.
    here, there = (f"198.18.{number}.{end}" for end in (1, 2))
    command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
    holder = around.enter_context(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    )
    assert holder.stdout is not None
    if not holder.stdout.readline():
        raise Unsupported("unshare --net gave no network namespace")
    cable = f"fastq{holder.pid}"
    inside = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
    _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
    around.callback(_run, "ip", "link", "del", cable)
    for prefix, address, device in (((), here, cable), (inside, there, "eth0")):
        _run(*prefix, "ip", "addr", "add", f"{address}/30", "dev", device)
        _run(*prefix, "ip", "link", "set", device, "up")
    _run(*inside, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{RATE}bit", *BUCKET)
    return Link(there, f"/proc/{holder.pid}/ns/net")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unsupported(f"{' '.join(command)}: {done.stderr.strip()}")


def _enter(namespace: int) -> None:
    """Move this thread into a network; os.setns is there from Python 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


class LinkedHosts(Placement):
    """Hosts at the ends of links, in place of those that Ray starts; workers are spread over them."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._hosts: list[Host] = []

    def start(self, spec: bytes) -> None:
        for link in self._links:
            with link.inside():
                self._hosts.append(Host(spec, link.address))
        self._addresses = [host.address() for host in self._hosts]

    def acquire(self, number: int, ready: Ready) -> None:
        address = self._addresses[number % len(self._addresses)]
        ready(Place(number, address, address.host))

    def release(self, number: int, why: str) -> None:
        """There is room for any number."""

    def death(self, number: int) -> str:
        return ""

    def close(self) -> None:
        for host in self._hosts:
            host.close()
