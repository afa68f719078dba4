"""Verbs of the command, and its exit status: 0, 1 (output closed by its reader), 2 (one-line error), 130 (stopped)."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from colonnade.cli import (
    bench,
    churn,
    compare,
    demo,
    doctor,
    evaluate,
    export,
    inspect,
    plan,
    predict,
    ranks,
    recommend,
    report,
    serve,
    settings,
    towers,
    train,
    verify,
)
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.terminal import Terminal, escape_control_characters

UsageError: Any = typer.BadParameter.__mro__[1]


class VerbGroup(TyperGroup):
    """Group of verbs that suggests the nearest one for an unknown verb."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            verb_names = [
                name
                for name in self.list_commands(ctx)
                if not getattr(self.get_command(ctx, name), "hidden", False)
            ]
            raise ConfigError(
                f"unknown verb {args[0]!r}; {settings.suggest_nearest(args[0], verb_names)}"
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=VerbGroup,
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
    "recommend": recommend.recommend,
    "serve": serve.serve,
    "report": report.report,
    "compare": compare.compare,
    "churn": churn.churn,
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
    "recommend": recommend.EXAMPLES,
    "serve": serve.EXAMPLES,
    "report": report.EXAMPLES,
    "compare": compare.EXAMPLES,
    "churn": churn.EXAMPLES,
    "inspect": inspect.EXAMPLES,
    "export": export.EXAMPLES,
    "verify": verify.EXAMPLES,
    "settings": settings.EXAMPLES,
    "bench": bench.EXAMPLES,
}
PASS_OPTIONS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
for _name, _verb in VERBS.items():
    _context = PASS_OPTIONS_ON if _name == "bench" else None
    app.command(_name, epilog=EPILOGS.get(_name), context_settings=_context)(_verb)
app.command("rank", hidden=True)(ranks.run_rank)


def print_version(is_wanted: bool) -> None:
    """Print the version and end, if `--version` was among the options."""
    if is_wanted:
        from colonnade import __version__

        print(f"colonnade {__version__}")
        raise typer.Exit


@app.callback()
def handle_global_options(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=print_version, help="Print the version."
    ),
) -> None:
    """Accept the options before a verb."""


def run_command(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status. `main` handles KeyboardInterrupt and BrokenPipeError."""
    try:
        status = app(list(arguments), prog_name="colonnade", standalone_mode=False)
        if status == 130:  # typer returns this after Ctrl-C
            raise KeyboardInterrupt
        return status if isinstance(status, int) else 0
    except ColonnadeError as error:
        # The text of an OSError begins with its number.
        print_error(str(error.strerror if isinstance(error, OSError) and error.strerror else error))
    except UsageError as error:
        if not arguments:  # the help has been shown
            return 2
        print_error(describe_usage_error(error))
    except typer.Abort:
        raise KeyboardInterrupt from None
    except BrokenPipeError:
        raise
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        print_error(
            f"{path}{error.strerror or error}. Check the path, its permissions and the space on its disk"
        )
    return 2


def print_error(text: str) -> None:
    """Print an error as one line to standard error, whatever file names and values are in it."""
    line = "; ".join(part for part in text.split("\n") if part)
    line = escape_control_characters(line).replace("\t", "\\t")
    console = Terminal(stderr=True, soft_wrap=True)
    console.print(f"error: {line}", style="red")
    sys.stderr.flush()


def describe_usage_error(error: Any) -> str:
    """Describe a usage error: what the command line lacks or has too much, and what to do."""
    context = getattr(error, "ctx", None)
    name = str(getattr(error, "option_name", ""))
    verb = "" if context is None else context.info_name
    help_command = (
        f"colonnade {verb} --help" if verb and verb != "colonnade" else "colonnade --help"
    )
    if type(error).__name__ == "NoSuchOption" and context is not None:
        options = [
            option
            for p in context.command.get_params(context)
            for option in p.opts
            if option.startswith("-")
        ]
        hint = suggest_setting(name, options) if "--set" in options else ""
        return f"unknown option {name!r}; {hint or settings.suggest_nearest(name, options)} See `{help_command}`"
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{message[:1].lower()}{message[1:]}. See `{help_command}`"


def suggest_setting(option: str, options: Sequence[str]) -> str:
    """Suggest the setting that an unknown option may mean, in `--set` form; "" if a real option is as near."""
    setting = option.lstrip("-").replace("-", "_")
    if difflib.get_close_matches(option, options, n=1, cutoff=0.8):
        return ""
    names = [name for name in settings.setting_names() if ".NAME." not in name]
    matches = [name for name in names if setting in (name, name.rpartition(".")[2])]
    if not matches:
        by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
        matches = difflib.get_close_matches(setting, names, n=1, cutoff=0.8)
        matches = matches or [
            by_last[m] for m in difflib.get_close_matches(setting, by_last, n=1, cutoff=0.8)
        ]
    suggestions = " or ".join(f"--set {name}=VALUE" for name in matches[:3])
    return f"did you mean {suggestions}?" if suggestions else ""
