"""`python -m experiments.cohort_squeeze`"""

import sys

import jax
import tyro

from experiments.cohort_squeeze import commands

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", not any(word.startswith("network") for word in sys.argv[1:2]))
    tyro.extras.subcommand_cli_from_dict(commands.COMMANDS, config=(tyro.conf.OmitArgPrefixes,))
