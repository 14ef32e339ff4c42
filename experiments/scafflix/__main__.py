"""`python -m experiments.scafflix`"""

import jax
import tyro

from experiments.scafflix import commands

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    tyro.extras.subcommand_cli_from_dict(commands.COMMANDS, config=(tyro.conf.OmitArgPrefixes,))
