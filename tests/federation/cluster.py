"""A SuperLink and SuperNodes on loopback, as BUILD.md starts them."""

import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np

APP = Path(__file__).parents[2] / "experiments" / "flower_ef_bv"
BIN = Path(sys.executable).parent
sys.path.insert(0, str(APP))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def family(pid: int) -> list[int]:
    """A process and all that it started, in whatever session: SuperNodes start executors, and these start apps."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def kill(process: subprocess.Popen) -> None:
    for pid in family(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(10)


def loaded(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


class Cluster:
    """Ports are free ones, and every process is ended, whatever happens.

    `secure`: with TLS and authentication; the folder has the files that BUILD.md's commands make.
    """

    def __init__(self, folder: Path, n: int, secure: bool = False):
        self.folder, self.link, self.port, self.n = folder, None, free_port(), n
        self.name = "secure" if secure else "local"
        self.nodes: dict[int, subprocess.Popen] = {}
        # XLA's flags as well: another compiler has other bits.
        self.environment = os.environ | {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "JAX_PLATFORMS": "cpu",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(APP.parents[1]),
        }
        (folder / "home").mkdir()
        protection = f'root-certificates = "{folder / "ca.crt"}"' if secure else "insecure = true"
        config = f'[superlink]\n[superlink.{self.name}]\naddress = "127.0.0.1:{self.port}"\n{protection}\n'
        (folder / "home" / "config.toml").write_text(config)

    def start(self, name: str, *command: str) -> subprocess.Popen:
        # A SuperNode starts a process for every message: what one has compiled serves the next.
        programs = {"JAX_COMPILATION_CACHE_DIR": str(self.folder / f"programs-{name}")}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                stdout=log,
                stderr=log,
                env=self.environment | programs,
                cwd=self.folder,
                start_new_session=True,
            )

    def up(self) -> None:
        """The SuperLink, and a SuperNode for every client that has none."""
        if self.link is None:
            tls = ("--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key")
            how = (*tls, "--enable-supernode-auth") if self.name == "secure" else ("--insecure",)
            port = ("--port", str(self.port), "--disable-runtime-dependency-installation")
            self.link = self.start("superlink", "flower-superlink", *how, *port)
            self.wait_for(lambda: self.listens(self.port), 60, "the SuperLink to listen")
        for i in range(self.n):
            if i not in self.nodes:
                if self.name == "secure":
                    self.register(i)
                self.nodes[i] = self.node(i)

    def register(self, i: int) -> None:
        process = self.start(f"register{i}", "flwr", "supernode", "register", f"node{i}.pub", self.name)
        assert process.wait(60) == 0, self.log(f"register{i}")

    def node(self, i: int) -> subprocess.Popen:
        keys = ("--root-certificates", "ca.crt", "--auth-supernode-private-key", f"node{i}")
        how = keys if self.name == "secure" else ("--insecure",)
        return self.start(
            f"node{i}",
            "flower-supernode",
            *how,
            "--superlink",
            f"127.0.0.1:{self.port}",
            "--port",
            str(free_port()),
            "--node-config",
            f"partition-id={i}",
        )

    def down(self) -> None:
        for process in [*self.nodes.values(), *([self.link] if self.link else [])]:
            kill(process)

    @staticmethod
    def listens(port: int) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    @staticmethod
    def wait_for(condition, seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"waited {seconds} s for {what}"
            time.sleep(0.1)

    def run(self, name: str, killed: int | None = None, **config) -> tuple[dict, str, list]:
        """`flwr run`.  The SuperNode `killed` dies once round 1 is over.

        Returns the configuration, the log and the rounds.
        """
        self.up()
        out = self.folder / name
        out.mkdir()
        settings = {"out": str(out), **config}
        text = " ".join(
            f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in settings.items()
        )
        process = self.start(name, "flwr", "run", str(APP), self.name, "--run-config", text, "--stream")
        try:
            if killed is not None:
                self.wait_for((out / "001.npz").exists, 240, f"round 1: {self.log(name)}")
                kill(self.nodes.pop(killed))
            process.wait(900)
        finally:
            kill(process)
        defaults = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        return defaults | settings, self.log(name), [loaded(path) for path in sorted(out.glob("*.npz"))]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()
