"""`python -m experiments.symwanda`"""

import tyro

from experiments.symwanda import commands

if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(commands.COMMANDS, config=(tyro.conf.OmitArgPrefixes,))
