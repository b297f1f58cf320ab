"""`groundswell config`: the resolved configuration, as YAML that `--config` reads back unchanged."""

import argparse

from conf.describe import to_yaml
from jobs.shell.command import Result, read_config, say


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Print the configuration of the command line."""
    say(to_yaml(read_config(arguments), comments=arguments.comments).rstrip())
