"""Llama and OPT as pure functions, with their checkpoints, tokens and perplexity."""

from commjax.llm.architectures import model
from commjax.llm.base import Model, Params, forward, init
from commjax.llm.checkpoints import load, open_folder, read_block, read_outer
from commjax.llm.config import Config
from commjax.llm.export import save

__all__ = [
    "Config",
    "Model",
    "Params",
    "forward",
    "init",
    "load",
    "model",
    "open_folder",
    "read_block",
    "read_outer",
    "save",
]
