"""The models compute what transformers' torch models compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import llm
from tests.llm import tiny

pytestmark = pytest.mark.slow


def test_the_goldens_cover_every_case():
    assert list(tiny.goldens()) == list(tiny.CASES)


@pytest.mark.parametrize("case", tiny.CASES)
def test_logits_equal_those_of_torch(case, tmp_path):
    model, params = llm.load(tiny.golden(tmp_path, case))
    logits = jax.jit(lambda params, tokens: llm.forward(model, params, tokens))(params, tiny.tokens(case))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, tiny.logits(case), rtol=0, atol=2e-5)
