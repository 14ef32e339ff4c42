"""What all parties agree on, and what each client has: no Flower here, so that a simulation can import it."""

from functools import cache, partial

import jax
import jax.numpy as jnp

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.data import embedded, libsvm, partition, stacked
from commjax.exchange import Contract
from commjax.problems import logistic


@cache
def split(name: str, n: int, seed: int):
    """The data set and each client's rows"""
    dataset = embedded.breast_cancer() if name == "breast_cancer" else libsvm.load(name)
    return dataset, partition.blocks(len(dataset.labels), n, seed=seed)


def data(config, id: int):
    """The rows of one client, and of no other (all of the same shape, so that one program serves all)"""
    dataset, rows = split(config["dataset"], config["n"], config["seed"])
    return jax.tree.map(lambda leaf: leaf[0], stacked.stack(dataset, [rows[id]], max(map(len, rows))))


@cache
def method(mu: float, k: int, half: int, nice: int):
    compressor = compressors.comp(k, half)
    compressor = compressors.m_nice(nice, compressor) if nice else compressor
    return compressor, ef_bv.ef_bv(jax.value_and_grad(partial(logistic.loss, mu=mu)), compressor)


def contract(config) -> Contract:
    dataset, rows = split(config["dataset"], config["n"], config["seed"])
    d = dataset.features.shape[1]
    compressor, algorithm = method(config["mu"], config["k"], d // 2, config["nice"])
    # All agree on the stepsize.  Here everybody has the file and computes it; where nobody has, agree on a bound of the L_i.
    hparams = ef_bv.theoretical(compressor.constants(d, config["n"]), logistic.constants(dataset, rows, config["mu"]))
    init = partial(algorithm.init, jnp.zeros(d))
    return Contract(algorithm, hparams, init, config["n"], jax.random.key(config["seed"]))
