"""Print every value of a configuration and where it came from."""

from pretrax.cli._arguments import ConfigFile, Overrides


def show(config: ConfigFile, overrides: Overrides = ()) -> None:
    from pretrax.config import load, resolved_yaml

    print(resolved_yaml(load(config, overrides)), end='')
