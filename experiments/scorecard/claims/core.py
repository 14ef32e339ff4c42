"""The promises of commjax itself: counted bits are emitted bytes, a sweep equals its runs, a resumed run is exact."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.core import runner
from commjax.problems import quadratic
from experiments.scorecard.claims import Claim, reproduced

METHOD = "core"
N, D, ROUNDS = 10, 40, 60
RANDOM = compressors.rand_k(4)  # it is random in every round, and its program compiles fast


@cache
def setting(compressor):
    """Return data, algorithm, hyperparameters and initial state of EF-BV on a random quadratic."""
    problem = quadratic.random(0, N, D, mu=0.5, L=5.0)
    data = jax.tree.map(jnp.asarray, problem)
    algorithm = ef_bv.ef_bv(jax.value_and_grad(quadratic.loss), compressor)
    hparams = ef_bv.theoretical(compressor.constants(D, N), quadratic.constants(problem))
    return data, algorithm, hparams, algorithm.init(jnp.ones(D), jnp.arange(N))


def ledger_is_bytes() -> Claim:
    """Replay a run message by message, and count the bytes of every message."""
    named = [
        compressors.top_k(4),
        compressors.rand_k(4),
        compressors.comp(2, 20),
        compressors.mix(2, 3),
        compressors.m_nice(4),
        compressors.perm_k(),
        compressors.natural(),
        compressors.dithering(4),
        compressors.ternary(),
        compressors.scaled_sign(),
    ]
    gradients = jax.jit(jax.vmap(jax.grad(quadratic.loss), in_axes=(None, 0)))
    ledger = weighed = 0.0
    for compressor in named:
        data, algorithm, hparams, state = setting(compressor)
        key = jax.random.key(0)
        step = jax.jit(algorithm.step)
        for number in range(4):
            rows = gradients(state.server.params, data) - state.clients.shift
            key_round = jax.random.fold_in(key, number)
            weighed += sum(8 * len(compressor.encode(key_round, rows[i], i, N)) for i in range(N)) / N
            state, metrics = step(key, hparams, state, data)
            ledger += float(metrics.bits_up)
    return Claim(
        METHOD,
        "Every bit in a plot is a bit that an encoder emits",
        "ours",
        "-",
        f"ledger {ledger:.1f}, bytes weighed {weighed:.1f} bits a client, over {4 * N * len(named)} messages of "
        f"{len(named)} compressors",
        *reproduced(abs(ledger - weighed) < 1e-6),
    )


def sweep_is_runs() -> Claim:
    data, algorithm, hparams, state = setting(RANDOM)
    keys = jax.random.split(jax.random.key(1), 3)
    grid = [hparams._replace(gamma=hparams.gamma * factor) for factor in (0.5, 1.0)]
    _, swept = runner.sweep(keys, algorithm, runner.stack(grid), state, data, ROUNDS)
    single = [[runner.run(key, algorithm, h, state, data, ROUNDS)[1].loss for key in keys] for h in grid]
    difference = float(np.abs(np.asarray(swept.loss) - np.asarray(single)).max())
    return Claim(
        METHOD,
        "A sweep over stepsizes and seeds is one program with the same results",
        "ours",
        "-",
        f"largest difference to {2 * 3} single runs: {difference:.1e}",
        *reproduced(difference < 1e-10),
    )


def resume_is_exact() -> Claim:
    data, algorithm, hparams, state = setting(RANDOM)
    key = jax.random.key(2)
    whole, _ = runner.loop(key, algorithm, hparams, state, data, ROUNDS, chunk=20, progress=False)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.ckpt"
        runner.loop(key, algorithm, hparams, state, data, ROUNDS // 3, chunk=20, checkpoint=path, progress=False)
        resumed, _ = runner.loop(
            key, algorithm, hparams, state, data, ROUNDS, chunk=20, checkpoint=path, progress=False
        )
    equal = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed)))
    return Claim(
        METHOD,
        "A run that was stopped goes on bit for bit",
        "ours",
        "-",
        f"all {len(jax.tree.leaves(whole))} leaves of the state equal: {equal}",
        *reproduced(equal),
    )


CLAIMS = [ledger_is_bytes, sweep_is_runs, resume_is_exact]
