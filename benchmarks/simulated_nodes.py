"""Two nodes on one machine, for `two_nodes_cpu.py`: network namespaces, and what torchrun or SLURM start on each."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from common import ROOT

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@dataclass
class Node:
    """Where a command of one node runs."""

    address: str
    words: tuple[str, ...] = ()
    pull_cable: tuple[str, ...] = ()
    put_cable: tuple[str, ...] = ()


@dataclass
class Launched:
    """One run on both nodes."""

    nodes: list[subprocess.Popen[bytes]]
    logs: list[Path]
    ended: dict[int, float] = field(default_factory=dict)

    def text(self, node: int) -> str:
        return self.logs[node].read_text(errors="replace")

    def wait(self, nodes: Sequence[int] = (0, 1), seconds: float = 1200.0) -> list[int | None]:
        """Exit codes of `nodes`; None where one has not ended in time."""
        until = time.monotonic() + seconds
        while len(self.ended.keys() & set(nodes)) < len(nodes) and time.monotonic() < until:
            for number in nodes:
                if number not in self.ended and self.nodes[number].poll() is not None:
                    self.ended[number] = time.monotonic()
            time.sleep(0.05)
        return [self.nodes[number].poll() for number in nodes]

    def errors(self, node: int) -> list[str]:
        return re.findall(r"^error: (.*)$", self.text(node), re.MULTILINE)


@contextmanager
def two_nodes() -> Iterator[list[Node]]:
    """Two network namespaces with a cable between them; two addresses of this machine where there are none."""
    tag = f"e3{os.getpid() % 10000}"
    names, ends = (f"{tag}n0", f"{tag}n1"), (f"{tag}v0", f"{tag}v1")
    addresses = ("10.77.0.1", "10.77.0.2")
    commands = [f"ip netns add {name}" for name in names]
    commands += [f"ip link add {ends[0]} type veth peer name {ends[1]}"]
    for name, end, address in zip(names, ends, addresses, strict=True):
        inside = f"ip netns exec {name} ip"
        commands += [f"ip link set {end} netns {name}", f"{inside} addr add {address}/24 dev {end}"]
        commands += [f"{inside} link set {end} up", f"{inside} link set lo up"]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no network namespaces here ({error}): the nodes are addresses of this machine")
        yield [Node("127.0.0.1"), Node("127.0.0.2")]
        return
    try:
        yield [
            Node(
                address,
                ("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={end}"),
                ("ip", "netns", "exec", name, "ip", "link", "set", end, "down"),
                ("ip", "netns", "exec", name, "ip", "link", "set", end, "up"),
            )
            for name, end, address in zip(names, ends, addresses, strict=True)
        ]
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "delete", name), check=False)


def launch(
    kind: str, nodes: Sequence[Node], work: Path, name: str, words: Sequence[str], *, hide: str | None = None
) -> Launched:
    """`train.py` on both nodes by torchrun, or with the environment that srun gives its tasks.

    hide: a directory of `work` that the second node does not see.
    """
    first, port = nodes[0].address, 29500 + len(list(work.glob("*.log"))) // 2
    launched = Launched([], [])
    for number, node in enumerate(nodes):
        command = [*node.words]
        if hide and number == 1:
            command += [
                "unshare",
                "-m",
                "sh",
                "-c",
                f'mount -t tmpfs none "{work / hide}" && exec "$@"',
                "sh",
            ]
        if kind == "torchrun":
            command += [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "2",
                "--nproc_per_node",
                "1",
            ]
            command += ["--rdzv_id", name, "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{first}:{port}"]
            command += ["--rdzv_conf", f"is_host={int(number == 0)}", "--local_addr", node.address]
        else:
            task = {"PROCID": number, "NODEID": number, "LOCALID": 0, "NTASKS": 2, "NTASKS_PER_NODE": 1}
            task |= {"NNODES": 2, "JOB_ID": port, "JOB_NAME": "train"}
            task |= dict.fromkeys(("NODELIST", "JOB_NODELIST"), ",".join(n.address for n in nodes))
            command += ["env", *(f"SLURM_{key}={value}" for key, value in task.items()), sys.executable]
        log = work / f"{name}.node{number}.log"
        command += [str(ROOT / "train.py"), *words]
        with log.open("wb") as file:
            launched.nodes.append(
                subprocess.Popen(command, cwd=work, env=ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT)
            )
        launched.logs.append(log)
    return launched


def run(work: Path, *command: str, expect: int = 0) -> str:
    """One command on this machine, to its end; what it printed."""
    done = subprocess.run(
        (sys.executable, *command), cwd=work, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == expect, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def kill(process: int) -> None:
    """End a process and its children as the loss of their node does."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        mine = children(process)
        for each in (process, *mine):
            os.kill(each, signal.SIGKILL)


def children(process: int) -> list[int]:
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(word) for word in text.split()]
