"""A real SuperLink and four real SuperNodes on loopback: the same trajectory, the same bytes, and what a death does."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.devices.mesh import client_mesh, shard_step
from commjax.federation import exchange
from tests.federation.cluster import Cluster, family

pytest.importorskip("flwr", reason="needs the extra flower")
from flower_ef_bv import task  # pyright: ignore[reportMissingImports]

pytestmark = [pytest.mark.extra, pytest.mark.long]
N = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("flower"), N)
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
    config, log, rounds = cluster.run("all", **problem(), rounds=2)
    assert len(rounds) == 2, log
    contract = task.contract(config)
    data = jax.tree.map(lambda *leaves: jnp.stack(leaves), *client_data(config))
    step = shard_step(contract.algorithm, client_mesh(N))  # one client a device
    state, key = contract.init(jnp.arange(N)), jax.random.split(contract.key)[0]
    for seen in rounds:
        state, metrics = step(key, contract.hparams, state, data)
        assert seen["params"].tobytes() == np.asarray(state.server.params).tobytes()
        assert seen["loss"] == float(metrics.loss)
        assert seen["bits"].tolist() == [float(metrics.bits_up), float(metrics.bits_down)]
        assert seen["absent"].tolist() == []
    assert np.any(rounds[-1]["params"] != 0)


def test_a_supernode_that_dies_does_not_end_the_run_where_absence_has_a_law(cluster):
    config, log, rounds = cluster.run("nice", killed=3, **problem(), nice=2, rounds=3, timeout=90.0)
    assert len(rounds) == 3, log
    assert 3 not in rounds[0]["absent"] and all(3 in seen["absent"] for seen in rounds[2:])
    # The same rounds in this process, the same clients absent.
    contract, data = task.contract(config), client_data(config)
    memory = {i: exchange.first_memory(contract, i) for i in range(N)}
    server, counted = contract.init(jnp.arange(N)).server, {}
    for number, seen in enumerate(rounds):
        uploads = {}
        for i, download in exchange.downloads(contract, server, counted).items():
            if i not in seen["absent"]:
                memory[i], uploads[i] = exchange.answer(contract, i, data[i], memory[i], download)
        server, report = exchange.close(contract, server, uploads)
        counted |= {i: number for i in uploads}
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
