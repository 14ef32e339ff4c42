"""From a config to the functions of its architecture."""

import functools

from commjax.llm import llama, opt
from commjax.llm.base import Model
from commjax.llm.config import Config, check


@functools.cache  # one tuple a config, so that jit finds what it compiled for the same functions
def model(config: Config) -> Model:
    """Llama or OPT.

    >>> from commjax.llm import config
    >>> model(config.from_json({"model_type": "opt"})).linear[-1]
    'fc2'
    """
    return (llama if config.architecture == "llama" else opt).model(check(config))
