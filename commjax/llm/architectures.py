"""Choose the functions of an architecture from a config."""

import functools

from commjax.llm import llama, opt
from commjax.llm.base import Model
from commjax.llm.config import Config, check


# The cache returns the same functions for the same config, so that jit reuses its compiled programs.
@functools.cache
def model(config: Config) -> Model:
    """Make the functions of a Llama or an OPT.

    Args:
        config: The config. It is checked first.

    Returns:
        The model.

    >>> from commjax.llm import config
    >>> model(config.from_json({"model_type": "opt"})).linear[-1]
    'fc2'
    """
    return (llama if config.architecture == "llama" else opt).model(check(config))
