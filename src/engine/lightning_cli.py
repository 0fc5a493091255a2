"""LightningCLI with strict parsing: one line for a parser's error, and what a configured class raises as it is."""

import functools
from collections.abc import Callable
from typing import Any

from jsonargparse import ArgumentError, Namespace
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, _InstantiatorFn

from src.engine.config import explain, raised_by_import, with_defaults
from src.engine.errors import UserError
from src.engine.run.directory import model_of_run


class Carried(BaseException):
    """Take an exception through code that catches every Exception."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class StrictCLI(LightningCLI):
    """Parse and build; run nothing by itself."""

    def __init__(self, argv: list[str], **kwargs: Any) -> None:
        self.argv = argv
        strict = {"exit_on_error": False, "allow_abbrev": False}
        super().__init__(
            args=with_defaults(argv, model_of_run),
            save_config_callback=None,  # it refuses to resume a run; open_run keeps the configuration
            parser_kwargs=strict | {name: dict(strict) for name in self.subcommands()},
            auto_configure_optimizers=False,  # optimizers belong to the module
            **kwargs,
        )

    @property
    def command(self) -> str:
        """Return fit, validate, test or predict."""
        assert self.subcommand is not None
        return self.subcommand

    @property
    def settings(self) -> Namespace:
        """Return the merged configuration of the subcommand."""
        return self.config[self.command]

    def dump(self, without: tuple[str, ...]) -> str:
        """Return the configuration as YAML that --config reads, with these settings at their defaults."""
        config, parser = self.settings.clone(), self._parser(self.subcommand)
        config.pop("config", None)
        for name in without:
            config[name] = parser.get_default(name)
        return parser.dump(config, skip_validation=True)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse strictly; an error becomes one line, unless a module raised it while being imported."""
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            if own := raised_by_import(error):
                raise own from None
            inner = self._subcommand_parsers.get(args[0], parser)
            raise UserError(explain(error, inner, self.argv)) from error

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would let the checkpoint's hyperparameters override explicit options here."""

    def _add_instantiators(self) -> None:
        """Let what a configured class raises pass the parser, which would reword it."""

        def carrying(instantiate: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(instantiate)
            def call(class_type: type, *args: Any, **kwargs: Any) -> Any:
                try:
                    return instantiate(class_type, *args, **kwargs)
                except Exception as error:
                    if not self.building:  # later, by a factory that the module was given
                        raise
                    raise Carried(error) from None

            return call

        for key, kind in (("model", LightningModule), ("data", LightningDataModule)):
            self.parser.add_instantiator(carrying(_InstantiatorFn(cli=self, key=key)), kind)
        self.parser.add_instantiator(carrying(lambda kind, *args, **kwargs: kind(*args, **kwargs)), object)

    def instantiate_classes(self) -> None:
        """Build what the configuration names; an exception of its code arrives as it was raised."""
        self.building, error = True, None
        try:
            super().instantiate_classes()
        except Carried as carried:
            error = carried.error
        self.building = False
        if error:  # raised here, where no other exception is being handled, so that its traceback stands alone
            raise error

    def _run_subcommand(self, subcommand: str) -> None:
        """Do nothing: Lightning calls this at the end of __init__, and `main` decides when to run."""
