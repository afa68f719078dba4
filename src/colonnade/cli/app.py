"""The verbs, and how a command ends: status 0, 1 (nobody reads the output), 2 (one line says what was wrong), 130."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from colonnade.cli import (
    bench,
    compare,
    convert,
    demo,
    doctor,
    evaluate,
    export,
    inspect,
    plan,
    predict,
    ranks,
    report,
    settings,
    towers,
    train,
    verify,
)
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.terminal import Terminal, printable

UsageError: Any = typer.BadParameter.__mro__[1]


class Verbs(TyperGroup):
    """Unknown verbs name the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            known = [
                name
                for name in self.list_commands(ctx)
                if not getattr(self.get_command(ctx, name), "hidden", False)
            ]
            raise ConfigError(f"unknown verb {args[0]!r}; {settings.nearest(args[0], known)}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Verbs,
    help="Train recommendation models whose embedding tables outgrow memory.",
    epilog="First time here: [bold]colonnade demo[/bold], then [bold]colonnade report[/bold] with the folder it "
    "names. Every verb has its own [bold]--help[/bold] with examples.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["--help", "-h"]},
)
VERBS: dict[str, Any] = {
    "demo": demo.demo,
    "train": train.train,
    "plan": plan.plan,
    "towers": towers.towers,
    "evaluate": evaluate.evaluate,
    "predict": predict.predict,
    "report": report.report,
    "compare": compare.compare,
    "inspect": inspect.inspect,
    "export": export.export,
    "verify": verify.verify,
    "settings": settings.settings,
    "doctor": doctor.doctor,
    "bench": bench.bench,
}
EPILOGS = {
    "demo": demo.EXAMPLES,
    "train": train.EXAMPLES,
    "plan": plan.EXAMPLES,
    "towers": towers.EXAMPLES,
    "evaluate": evaluate.EXAMPLES,
    "predict": predict.EXAMPLES,
    "report": report.EXAMPLES,
    "compare": compare.EXAMPLES,
    "inspect": inspect.EXAMPLES,
    "export": export.EXAMPLES,
    "verify": verify.EXAMPLES,
    "settings": settings.EXAMPLES,
    "bench": bench.EXAMPLES,
}
PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
for _name, _verb in VERBS.items():
    _context = PASSES_ON if _name == "bench" else None
    app.command(_name, epilog=EPILOGS.get(_name), context_settings=_context)(_verb)
    if _name == "predict":
        app.add_typer(convert.app, name="convert", cls=Verbs, epilog=convert.EXAMPLES)
app.command("rank", hidden=True)(ranks.rank)


def print_version(is_wanted: bool) -> None:
    """Print the version and end, if `--version` was among the options."""
    if is_wanted:
        from colonnade import __version__

        print(f"colonnade {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=print_version, help="Print the version."
    ),
) -> None:
    """Take the options that stand before a verb."""


def run(arguments: Sequence[str]) -> int:
    """The exit status. Raises KeyboardInterrupt, BrokenPipeError for `main` to end with."""
    try:
        ended = app(list(arguments), prog_name="colonnade", standalone_mode=False)
        if ended == 130:  # typer's word for Ctrl-C
            raise KeyboardInterrupt
        return ended if isinstance(ended, int) else 0
    except ColonnadeError as error:
        # An OSError's own words begin with its number.
        say_error(str(error.strerror if isinstance(error, OSError) and error.strerror else error))
    except UsageError as error:
        if not arguments:  # the help has been shown
            return 2
        say_error(usage_words(error))
    except typer.Abort:
        raise KeyboardInterrupt from None
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        say_error(
            f"{where}{error.strerror or error}. Check the path, its permissions and the space on its disk"
        )
    return 2


def say_error(text: str) -> None:
    """One line, whatever file names and values are in it."""
    line = "; ".join(part for part in text.split("\n") if part)
    line = printable(line).replace("\t", "\\t")
    console = Terminal(stderr=True, soft_wrap=True)
    console.print(f"error: {line}", style="red")
    sys.stderr.flush()


def usage_words(error: Any) -> str:
    """What a command line lacks or has too much, and what to do."""
    context = getattr(error, "ctx", None)
    name = str(getattr(error, "option_name", ""))
    verb = "" if context is None else context.info_name
    shown = f"colonnade {verb} --help" if verb and verb != "colonnade" else "colonnade --help"
    if type(error).__name__ == "NoSuchOption" and context is not None:
        options = [
            option
            for p in context.command.get_params(context)
            for option in p.opts
            if option.startswith("-")
        ]
        hint = nearest_setting(name, options) if "--set" in options else ""
        return f"unknown option {name!r}; {hint or settings.nearest(name, options)} See `{shown}`"
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{message[:1].lower()}{message[1:]}. See `{shown}`"


def nearest_setting(option: str, options: Sequence[str]) -> str:
    """Name the setting that an unknown option is meant to be, as `--set` takes it; "" where an option is as near."""
    wanted = option.lstrip("-").replace("-", "_")
    if difflib.get_close_matches(option, options, n=1, cutoff=0.8):
        return ""
    names = [name for name in settings.setting_names() if ".NAME." not in name]
    meant = [name for name in names if wanted in (name, name.rpartition(".")[2])]
    if not meant:
        by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
        meant = difflib.get_close_matches(wanted, names, n=1, cutoff=0.8)
        meant = meant or [
            by_last[m] for m in difflib.get_close_matches(wanted, by_last, n=1, cutoff=0.8)
        ]
    shown = " or ".join(f"--set {name}=VALUE" for name in meant[:3])
    return f"did you mean {shown}?" if shown else ""
