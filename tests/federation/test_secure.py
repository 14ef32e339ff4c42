"""BUILD.md's recipe with TLS and authentication, its commands as they stand."""

import re
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.federation import exchange
from tests.federation.cluster import Cluster, kill

pytest.importorskip("flwr", reason="needs the extra flower")
from flower_ef_bv import task  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.slow

RECIPE = (Path(__file__).parents[2] / "BUILD.md").read_text().partition("### With TLS")[2]


@pytest.fixture
def cluster(tmp_path):
    for program in ("openssl", "ssh-keygen"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    commands = re.findall(r"^    ((?:openssl|printf|ssh-keygen) .*)$", RECIPE, re.MULTILINE)
    assert len(commands) == 6
    commands.append(commands[-1].replace("node1", "node2"))
    subprocess.run("\n".join(commands), shell=True, cwd=tmp_path, check=True, capture_output=True)
    cluster = Cluster(tmp_path, 2, secure=True)
    try:
        yield cluster
    finally:
        cluster.down()


@pytest.mark.extra
@pytest.mark.long
def test_a_run_with_tls_and_authentication_is_the_run_and_a_stranger_is_kept_out(cluster):
    cluster.up()
    stranger = cluster.node(2)  # its key is not registered
    try:
        config, log, rounds = cluster.run("secure", n=2, rounds=1)
        assert len(rounds) == 1, log
        assert stranger.wait(60) != 0 and "Failed to activate SuperNode" in cluster.log("node2")
    finally:
        kill(stranger)
    contract = task.contract(config)
    server = contract.init(jnp.arange(2)).server
    downloads = exchange.downloads(contract, server, {})
    data = [jax.tree.map(jnp.asarray, task.data(config, i)) for i in range(2)]
    uploads = {
        i: exchange.answer(contract, i, data[i], exchange.first_memory(contract, i), downloads[i])[1] for i in range(2)
    }
    server, report = exchange.close(contract, server, uploads)
    assert rounds[0]["params"].tobytes() == np.asarray(server.params).tobytes() and np.any(server.params != 0)
    assert rounds[0]["bits"].tolist() == [report.bits_up, report.bits_down]
