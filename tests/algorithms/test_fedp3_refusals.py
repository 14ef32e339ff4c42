"""FedP3 refuses options, plans, batches and pruning that do not fit, with the value and what is allowed."""

import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import fedp3
from commjax.algorithms.fedp3 import aggregation, local_pruning, submodels
from commjax.core import local
from commjax.pruning import scores
from tests.algorithms.fedp3_cases import DATA, GAMMA, HELD, IDS, KEY, MIXED, PARAMS, ROWS, N, loss

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "how, words",
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 1, "cohort": 0}, "cohort must be at least 1"),
    ],
)
def test_bad_options_are_refused(how, words):
    with pytest.raises(ValueError, match=words):
        fedp3.fedp3(loss, MIXED, **how)


@pytest.mark.parametrize(
    "how, words",
    [
        (
            {"pruning": submodels.by_score({"a": scores.ri()})},
            "score: none for layer 'b', which is pruned; allowed: one for",
        ),
        ({"pruning": submodels.by_score({"z": scores.ri()})}, "score: no layer 'z'"),
        (
            {"local_pruning": local_pruning.ordered(np.array([0.5, 0.7]))},
            "low: 2 ratios of local pruning; allowed: one number or one for each of 4",
        ),
        ({"local_pruning": local_pruning.uniform(np.full(3, 0.5))}, "low: 3 ratios of local pruning"),
    ],
)
def test_options_that_do_not_fit_the_plan_are_refused(how, words):
    with pytest.raises(ValueError, match=words):
        fedp3.fedp3(loss, MIXED, steps=1, **how).init(PARAMS, IDS)


def test_a_batch_larger_than_a_client_s_rows_is_refused():
    algorithm = fedp3.fedp3(loss, MIXED, local.minibatch(7), steps=1)
    with pytest.raises(ValueError, match="sample draws batches of 7, but a client has 6 rows; allowed: at most 6"):
        algorithm.step(KEY, fedp3.HParams(GAMMA), algorithm.init(PARAMS, IDS), DATA)
    padded = {**DATA, "weights": jnp.ones((N, ROWS)).at[2, 3:].set(0.0)}
    four = fedp3.fedp3(loss, MIXED, local.minibatch(4), steps=1)
    with pytest.raises(ValueError, match="batch=4, but client 2 has 3 rows"):
        four.init(PARAMS, IDS, data=padded)
    four.init(PARAMS, IDS, data=DATA)


def test_a_plan_for_other_clients_or_params_is_refused():
    algorithm = fedp3.fedp3(loss, MIXED, steps=1)
    with pytest.raises(ValueError, match="ids: 3 clients, but the plan is for 4"):
        algorithm.init(PARAMS, jnp.arange(3))
    with pytest.raises(ValueError, match="params have 2 leaves, the plan's layers 6"):
        algorithm.init({"a": PARAMS["a"]}, IDS)


def test_bad_pruning_is_refused():
    for low in (0.0, 1.5, np.array([0.5, -1.0])):
        with pytest.raises(ValueError, match="allowed: 0 < low <= 1"):
            local_pruning.uniform(low)
    with pytest.raises(ValueError, match="levels=0; allowed: at least 1"):
        local_pruning.ordered(0.5, 0)
    with pytest.raises(ValueError, match=r"steps=-1, stepsize=1\.0; allowed"):
        aggregation.attention(HELD, steps=-1)
    with pytest.raises(ValueError, match=r"stepsize=0\.0; allowed"):
        aggregation.attention(HELD, stepsize=0.0)


def test_a_batch_larger_than_a_client_s_data_is_refused():
    local.check_batch(ROWS, DATA)
    with pytest.raises(ValueError, match="batch=7, but client 0 has 6 rows; allowed: 1 to 6"):
        local.check_batch(7, DATA)
    weights = jnp.asarray([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    local.check_batch(1, {"x": jnp.ones((2, 3)), "weights": weights})
    with pytest.raises(ValueError, match="batch=2, but client 1 has 1 rows; allowed: 1 to 1"):
        local.check_batch(2, {"x": jnp.ones((2, 3)), "weights": weights})
    with pytest.raises(ValueError, match="batch=0"):
        local.check_batch(0, DATA)
