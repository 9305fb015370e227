"""Links of a known rate: for each a network namespace of its own, and a cable to it that is limited on the
far side (tc's token bucket). Needs root.

A namespace is that of a process which ends with this one, and it is gone with the last that runs in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from bench.peers import Unsupported

TOOLS = ("ip", "tc", "unshare", "nsenter")
RATE = 10**9  # bits per second
# The bucket counts a frame with its Ethernet header (14 bytes) and not what a cable adds (24 bytes). IP and
# TCP have 52 bytes of header with time stamps.
FRAME, HEADERS, MTU = 1514, 52, 1500
PAYLOAD = RATE / 8 * (MTU - HEADERS) / FRAME
"""Bytes per second of a stream that fill such a link: 119.6 million."""
BUCKET = ("burst", "256kb", "latency", "50ms")


class Link(NamedTuple):
    """A machine at the end of a cable.

    Attributes:
        here, there: addresses of this end, and of that machine's.
        inside: begins a command that runs on that machine, as far as its network goes.
    """

    here: str
    there: str
    inside: tuple[str, ...]


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
    assert holder.stdout is not None, "it was started with a pipe"
    if not holder.stdout.readline():
        raise Unsupported("unshare --net gave no network namespace")
    cable = f"fastq{holder.pid}"
    inside = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
    _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
    around.callback(_run, "ip", "link", "del", cable)
    for prefix, address, device in (((), here, cable), (inside, there, "eth0")):
        _run(*prefix, "ip", "addr", "add", f"{address}/30", "dev", device)
        _run(*prefix, "ip", "link", "set", device, "up")
    _run(*inside, "ip", "link", "set", "lo", "up")
    _run(*inside, "ip", "route", "add", "default", "via", here)  # to this machine's other addresses
    _run(*inside, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{RATE}bit", *BUCKET)
    return Link(here, there, inside)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unsupported(f"{' '.join(command)}: {done.stderr.strip()}")
