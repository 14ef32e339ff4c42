"""The promises of commjax about devices.

Devices do not change a result, and the bytes that travel between them are those of the formula.
"""

import json
import os
import subprocess
import sys
from functools import cache

from experiments.scorecard.claims import Claim, reproduced

METHOD = "devices"
N, DEVICES = 10, (1, 2, 3, 4)  # 3 and 4 do not divide the number of clients

# The devices are simulated. A process must request them before it first uses JAX, so the script runs in a new process.
SCRIPT = f"""
import json, warnings
warnings.simplefilter("ignore")
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
from commjax import compressors
from commjax.devices.collectives import bytes_up, collectives
from commjax.devices.mesh import client_mesh, pad_rows
from commjax.core import runner
from commjax.core.compiled import compiled_run
from commjax.algorithms import ef_bv
from commjax.problems import quadratic

problem = quadratic.random(0, {N}, 40, mu=0.5, L=5.0)
data = jax.tree.map(jnp.asarray, problem)
compressor = compressors.rand_k(4)
algorithm = ef_bv.ef_bv(jax.value_and_grad(quadratic.loss), compressor)
hparams = ef_bv.theoretical(compressor.constants(40, {N}), quadratic.constants(problem))
state, key = algorithm.init(jnp.ones(40), jnp.arange({N})), jax.random.key(0)
wanted = runner.run(key, algorithm, hparams, state, data, 60)[0].server.params
found = {{}}
for devices in {DEVICES}:
    mesh = client_mesh(devices)
    # The rows are padded first, as each process does it: {N} of them are clients.  \
What is measured is the program that runs.
    rows, even = pad_rows((state.clients, data), devices)
    begin = state._replace(clients=rows)
    program = compiled_run.lower(key, algorithm, hparams, begin, even, 60, mesh=mesh, n={N}).compile()
    params, moved = program(key, hparams, begin, even)[0].server.params, collectives(program)
    found[devices] = (float(jnp.abs(params - wanted).max()), moved.bytes, sum(moved.counts.values()))
print(json.dumps([found, bytes_up(algorithm, hparams, state, data), float(jnp.abs(wanted).max())]))
"""


@cache
def measured() -> tuple[dict[str, tuple[float, int, int]], int, float]:
    """Run the script.

    Returns:
        Number of devices -> (largest difference of the params, bytes, number of collectives); the bytes of the formula;
        the largest param.
    """
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(max(DEVICES)), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the run on simulated devices failed: {done.stderr[-2000:]}")
    found, formula, size = json.loads(done.stdout.splitlines()[-1])
    return found, formula, size


def devices_do_not_matter() -> Claim:
    found, _, size = measured()
    worst = max(difference for difference, _, _ in found.values())
    return Claim(
        METHOD,
        "Devices do not change the result, also where they do not divide the clients",
        "ours",
        "-",
        f"{N} clients, 60 rounds of EF-BV on {', '.join(found)} devices: parameters of size {size:.3f} differ by "
        f"{worst:.1e} at most",
        *reproduced(worst < 1e-10),
    )


def bytes_are_the_formula() -> Claim:
    found, formula, _ = measured()
    several = {number: values for number, values in found.items() if number != "1"}  # one device sends nothing
    right = all(bytes_ == formula for _, bytes_, _ in several.values())
    texts = ", ".join(f"{number}: {bytes_} in {count}" for number, (_, bytes_, count) in several.items())
    return Claim(
        METHOD,
        "A round reduces one message, its bits and one loss over the devices",
        "ours",
        f"{formula} bytes",
        f"a round in the compiled run of {N} clients, bytes and collectives by devices: {texts}",
        *reproduced(right),
    )


CLAIMS = [devices_do_not_matter, bytes_are_the_formula]
