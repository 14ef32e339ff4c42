"""Damaged payloads of methods that write their own messages: an error with a reason, or a tree of the right shapes.

`COMMJAX_FUZZ=20000 pytest -m long tests/federation/test_codec_fuzz.py` tries that many; CI tries a thousand each.
"""

import os

import jax
import jaxtyping
import pytest

from commjax.federation.contract import key_round
from commjax.federation.envelope import HEADER_BYTES
from tests import registry
from tests.compressors.test_fuzz import mutations
from tests.federation.exchange_cases import ONCE, PRIVATE, Federation, contract_of

pytestmark = pytest.mark.long

TRIALS = int(os.environ.get("COMMJAX_FUZZ", "1000"))


def codecs(name):
    exchange = registry.build(name).algorithm.exchange
    return [way for way in ("download", "upload") if getattr(exchange, way) is not None]


@pytest.mark.parametrize("name, way", [(name, way) for name in ONCE for way in codecs(name)])
def test_a_damaged_payload_is_refused_or_has_the_right_shapes(name, way):
    contract, data = contract_of(name)
    federation = Federation(contract, data, (lambda: jax.random.key(1)) if name in PRIVATE else None)
    server = federation.server
    downloads, uploads, _ = federation.round()
    payload = {"download": downloads, "upload": uploads}[way][1][HEADER_BYTES:]
    key = key_round(contract, 0)
    read = getattr(contract.algorithm.exchange, way).read
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(read(key, payload, server, 1, contract.n))]
    refused = 0
    jaxtyping.config.update("jaxtyping_disable", True)  # as users run it; the checks would take most of the time
    try:
        for damaged in mutations(payload, 3, TRIALS):
            try:
                value = read(key, damaged, server, 1, contract.n)
            except ValueError as error:
                assert str(error)
                refused += 1
            else:
                assert len(damaged) == len(payload)
                assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(value)] == shapes
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert TRIALS // 2 - 1 <= refused < TRIALS
