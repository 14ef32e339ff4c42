"""`python -m experiments.fedp3`"""

import tyro

from experiments.fedp3 import commands

if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(commands.COMMANDS, config=(tyro.conf.OmitArgPrefixes,))
