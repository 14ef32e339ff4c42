"""Quadratics with exact proxes and samplings of four clients: what the tests of SPPM-AS's theorems share."""

import json
from pathlib import Path

import numpy as np
import pytest

from commjax.problems import quadratic
from commjax.sampling import samplings

GOLDENS = json.loads((Path(__file__).parents[1] / "data" / "goldens_sppm.json").read_text())
N, D = 4, 3
PROBLEM = quadratic.random(0, N, D, mu=0.3, L=3.0)
MU = np.linalg.eigvalsh(PROBLEM.H)[:, 0]
STAR = quadratic.optimum(PROBLEM).params
GAMMAS = 10.0 ** np.arange(-2, 4)
SAMPLINGS = [
    samplings.full(N),
    samplings.nonuniform([0.4, 0.3, 0.2, 0.1]),
    samplings.importance(MU),
    samplings.nice(N, 1),
    samplings.nice(N, 2),
    samplings.nice(N, 3),
    samplings.block([[0, 1], [2, 3]], [0.25, 0.75]),
    samplings.block([[0], [1, 2, 3]]),
    samplings.stratified([[0, 1], [2, 3]]),
    samplings.stratified([[0], [1, 2, 3]]),
    samplings.stratified_of([[0], [1, 2], [3]], 2),
    samplings.block_of([[0, 2], [1, 3]], 1),
]
each = pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: sampling.name)


def gradients_at(x, problem=PROBLEM):
    return np.einsum("nij,nj->ni", problem.H, x - problem.c)


def centred(rows):
    return rows - rows.mean(axis=0)


def prox(gamma, weights, y, problem=PROBLEM):
    """argmin_x sum_i w_i f_i(x) + |x - y|^2/(2 gamma) for rows y"""
    H = np.einsum("n,nij->ij", weights, problem.H)
    right = np.einsum("n,nij,nj->i", weights, *problem)
    return np.linalg.solve(np.eye(H.shape[0]) + gamma * H, (y + gamma * right).T).T


def cohort_weights(sampling, ids):
    weights = np.zeros(sampling.n)
    weights[list(ids)] = 1 / (sampling.n * sampling.probabilities[list(ids)])
    return weights


def starts(count=30, star=STAR, seed=1):
    """Points at distances 1e-6 to 1e3 from x*, and x*"""
    rng = np.random.default_rng(seed)
    away = rng.standard_normal((count, len(star))) * 10.0 ** rng.uniform(-6, 3, (count, 1))
    away[0] = 0
    return star + away


def squares(rows):
    return np.sum(rows**2, axis=-1)
