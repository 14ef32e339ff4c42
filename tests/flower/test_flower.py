"""A real SuperLink and four real SuperNodes on loopback: the same trajectory, the same bytes, and what a death does."""

import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import exchange, parallel

pytest.importorskip("flwr", reason="needs the extra flower")
pytestmark = [pytest.mark.extra, pytest.mark.slow]

APP = Path(__file__).parents[2] / "experiments" / "flower_ef_bv"
BIN = Path(sys.executable).parent
N = 4
sys.path.insert(0, str(APP))
from flower_ef_bv import task  # pyright: ignore[reportMissingImports]  # noqa: E402


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
    """Ports are free ones, and every process is ended, whatever happens."""

    def __init__(self, folder: Path):
        self.folder, self.link, self.port = folder, None, free_port()
        self.nodes: dict[int, subprocess.Popen] = {}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
        self.environment = inherited | {
            "FLWR_HOME": str(folder / "home"), "FLWR_TELEMETRY_ENABLED": "0", "JAX_PLATFORMS": "cpu",
            "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(APP.parents[1]),
        }  # fmt: skip
        (folder / "home").mkdir()
        config = (
            f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        (folder / "home" / "config.toml").write_text(config)

    def start(self, name: str, *command: str) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], stdout=log, stderr=log, env=self.environment, cwd=self.folder,
                start_new_session=True,
            )  # fmt: skip

    def up(self) -> None:
        """The SuperLink, and a SuperNode for every client that has none."""
        if self.link is None:
            port = str(self.port)
            command = ("flower-superlink", "--insecure", "--port", port, "--disable-runtime-dependency-installation")
            self.link = self.start("superlink", *command)
            self.wait_for(lambda: self.listens(self.port), 60, "the SuperLink to listen")
        for i in range(N):
            if i not in self.nodes:
                self.nodes[i] = self.start(
                    f"node{i}", "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}",
                    "--port", str(free_port()), "--node-config", f"partition-id={i}",
                )  # fmt: skip

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
        """`flwr run`; `killed`: the SuperNode that dies once round 1 is over.  The configuration, the log and the rounds."""
        self.up()
        out = self.folder / name
        out.mkdir()
        settings = {"out": str(out), **config}
        text = " ".join(
            f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in settings.items()
        )
        process = self.start(name, "flwr", "run", str(APP), "local", "--run-config", text, "--stream")
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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("flower"))
    try:
        yield cluster
    finally:
        cluster.down()


def problem() -> dict:
    """What the configuration says of the data"""
    if not os.environ.get("COMMJAX_DATA"):
        return {"dataset": "breast_cancer"}
    return {"dataset": "mushrooms", "features": 112, "smoothness": 2.69}


def client_data(config):
    return [jax.tree.map(jnp.asarray, task.data(config, i)) for i in range(N)]


def test_payloads_are_the_ledger_and_the_trajectory_is_the_simulations_bit_for_bit(cluster):
    config, log, rounds = cluster.run("all", **problem(), rounds=3)
    assert len(rounds) == 3, log
    contract = task.contract(config)
    data = jax.tree.map(lambda *leaves: jnp.stack(leaves), *client_data(config))
    step = parallel.shard_step(contract.algorithm, parallel.client_mesh(N))  # one client a device
    state, key = contract.init(jnp.arange(N)), jax.random.split(contract.key)[0]
    for seen in rounds:
        state, metrics = step(key, contract.hparams, state, data)
        assert seen["params"].tobytes() == np.asarray(state.server.params).tobytes()
        assert seen["loss"] == float(metrics.loss)
        assert seen["bits"].tolist() == [float(metrics.bits_up), float(metrics.bits_down)]
        assert seen["absent"].tolist() == []
    assert np.any(rounds[-1]["params"] != 0)


def test_a_supernode_that_dies_does_not_end_the_run_where_absence_has_a_law(cluster):
    config, log, rounds = cluster.run("nice", killed=3, **problem(), nice=2, rounds=4, timeout=90.0)
    assert len(rounds) == 4, log
    assert 3 not in rounds[0]["absent"] and all(3 in seen["absent"] for seen in rounds[2:])
    # The same rounds in this process, the same clients absent.
    contract, data = task.contract(config), client_data(config)
    memory = {i: exchange.first_memory(contract, i) for i in range(N)}
    server, counted = contract.init(jnp.arange(N)).server, {}
    for number, seen in enumerate(rounds):
        replies = {}
        for i, letter in exchange.letters(contract, server, counted).items():
            if i not in seen["absent"]:
                memory[i], replies[i] = exchange.answer(contract, i, data[i], memory[i], letter)
        server, report = exchange.close(contract, server, replies)
        counted |= {i: number for i in replies}
        assert seen["params"].tobytes() == np.asarray(server.params).tobytes()
        assert seen["bits"][0] == report.bits_up


def test_a_supernode_that_dies_ends_the_run_with_a_clear_error_where_absence_has_none(cluster):
    _, log, rounds = cluster.run("strict", killed=2, **problem(), rounds=4, timeout=90.0)
    assert 1 <= len(rounds) < 4
    assert "AbsentError" in log and "client 2: " in log and "has no theory for an absent client" in log, log


def test_no_process_is_left_behind(cluster):
    everyone = {pid for process in [cluster.link, *cluster.nodes.values()] for pid in family(process.pid)}
    assert len(everyone) > N
    cluster.down()
    cluster.nodes, cluster.link = {}, None
    Cluster.wait_for(lambda: not any(alive(pid) for pid in everyone), 10, f"{everyone} to end")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
