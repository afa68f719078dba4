"""`colonnade settings`: list the settings of a run with their units and defaults."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from colonnade.errors import ConfigError
from colonnade.sizes import SettingWords

MEANINGS = {
    "at_least": "Lowest rating that counts as an interaction; default: any.",
    "bags": "Ids a sample, for each field with several ids.",
    "candidates": "Wrong heads and tails that each triple is compared with.",
    "cardinalities": "Number of different ids of each field.",
    "columns": "Meaning of all columns in the order of the file, e.g. [tail, relation, head], or their names.",
    "communities": "Groups of nodes that link mostly among themselves.",
    "core": "Least number of interactions of a user and of an item; others are left out.",
    "days": "true: every file or folder directly in data.path is a day (train.progressive).",
    "degree": "Mean number of links of a node.",
    "delimiter": "One character; default: what the first line has: a tab, else most of , ; | else a blank.",
    "entity_names": "Names of entities in the order of their numbers, as JSON; a run records them.",
    "event": "Column of kinds of events; default: by its name.",
    "events": "Values of the event column that count as interactions, e.g. [purchase]; default: any.",
    "exponent": "Skew of the popularity of ids or nodes; larger is more skewed.",
    "fan_outs": "Number of neighbours sampled of a node, then of each neighbour, e.g. [10, 5].",
    "graph_seed": "Seed of the graph itself.",
    "group_by": "Category of users whose ratings stay together in a batch (gplvmf), e.g. user.",
    "groups": "Lists of fields that interact; default: drawn at random.",
    "item": "Column of items; default: by its name.",
    "items": "File with a row for each item: features by which models know it.",
    "join": "Tables with more columns of the samples, one row for each value of a key column: join.user_id=users.csv.",
    "label": "Label column if no schema names it; default: label, click, clicked, target or y.",
    "label_model": "How labels depend on ids.",
    "max_cardinality": "Larger fields are cut to this number of ids.",
    "max_history": "Number of a person's newest items in a sample.",
    "max_pairs": "Number of training pairs of a person; default: all.",
    "max_validation": "Number of validation triples that are ranked; default: all.",
    "mixing": "Share of links that leave their community.",
    "names": "Column names of files without a header, e.g. [label, user, item].",
    "negatives": "Wrong items that each item of a sequence is compared with.",
    "node_digest": "Digest of the nodes of a graph, whose numbers are rows of its table; a run records it.",
    "nodes": "Number of nodes.",
    "null_values": "Texts that mean a missing value, in addition to empty text, e.g. [NA, NULL].",
    "num_test": "Number of test samples.",
    "num_train": "Number of training samples.",
    "order": "Order of a person's items: time, file or none.",
    "order_by": "Column of times or numbers: the held-out samples are the last by it, e.g. timestamp.",
    "positive_rate": "Share of samples with label 1.",
    "quote": "Character around fields with delimiters or newlines; none: there are no such fields.",
    "ranked_negatives": "Number of drawn items, or file of those, among which held-out items are ranked; default: all.",
    "rating": "Column of ratings; default: by its name.",
    "relation_names": "Names of relations in the order of their numbers, as JSON; a run records them.",
    "samples": "Kind of a sample: one pair, a person's sequence, or a node with its neighbours.",
    "schema": "Meaning of the columns: a mapping, or the path of a YAML file; default: inferred.",
    "seed": "Seed of the order of samples, or of generated samples.",
    "shuffle_window": "Samples that are shuffled together, e.g. 100000; 0: the order of the files.",
    "signal": "Standard deviation of the logit.",
    "split": "How interactions are split: leave_one_out, time, per_user, rows, users or files.",
    "split_by": "Column whose values stay together in one part, e.g. user.",
    "split_seed": "Seed by which parts are drawn at random.",
    "subsample": "Whether frequent entities are drawn less often.",
    "test": "Separate file or folder with the test samples.",
    "test_after": "Time, or number, from which on samples are for testing, e.g. 2024-05-31; of tables with `order_by`.",
    "test_fraction": "Without `test`: share of the samples for testing, 0 to 1, the last in the order of the files.",
    "threads": "Number of parts of a file that are read at a time.",
    "time": "Column of times; default: by its name.",
    "types": "Types of feedback, the strongest first, e.g. [purchase, cart, [view, click]]; default: one type.",
    "user": "Column of users; default: by its name.",
    "users": "File with a row for each user: features by which models know it.",
    "validation": "Separate file or folder with the validation samples.",
    "validation_after": "Time, or number, from which on earlier samples than the test part validate.",
    "validation_fraction": "Without `validation`: share of the samples for validation, 0 to 1, the last before the "
    "test part.",
}  # fmt: skip


EXAMPLES = (
    "[bold]Examples[/bold]\n\n  colonnade settings\n\n  colonnade settings train\n\n"
    "  colonnade settings plan.memory.dram\n\n  colonnade settings learning rate\n\n"
    "  colonnade settings data.options.csv   (the options of --data csv)"
)
OPTIONS = "data.options"

PARTS = ("train", "validation", "test")


def check_part(part: str) -> None:
    """Raise ConfigError for a part that no data set has."""
    if part not in PARTS:
        raise ConfigError(f"unknown part {part!r}; choose from {', '.join(PARTS)}")


def settings(
    which: Annotated[
        list[str] | None,
        typer.Argument(
            help="A section (train), a setting (plan.memory.dram), data.options with or without a kind of data, or "
            "words to search for in names and meanings; default: all settings."
        ),
    ] = None,
) -> None:
    """List settings with their defaults, possible values and meanings."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    from colonnade.terminal import Terminal

    blocks: list[Any] = []
    for name, default, values, meaning in _select_setting_lines(" ".join(which or [])):
        title = Text(name, style="bold")
        title.append(f" = {default}" if default else "", style="not bold")
        title.append(f"  ({values})" if values else "", style="not bold dim")
        blocks += [title, Padding(Text(meaning), (0, 0, 0, 4), expand=False)]
    Terminal().print(Group(*blocks))  # one write, so that a pipe closed early is no error


def setting_names() -> list[str]:
    """Return the dotted names of all settings, nested sections included."""
    from colonnade.config.run import RunConfig

    return [name for name, _ in _walk_setting_fields(RunConfig)]


def _select_setting_lines(pattern: str) -> list[tuple[str, str, str, str]]:
    """Return (name, default, values, meaning) of each setting that `pattern` selects; all of them if it is empty.

    Raises ConfigError if there is none.
    """
    from colonnade.config.run import RunConfig

    if pattern == OPTIONS or pattern.startswith(f"{OPTIONS}."):
        return _list_data_options(pattern[len(OPTIONS) + 1 :])
    lines = [
        (
            name,
            _format_default(field.get_default(call_default_factory=True)),
            _describe_own_values(field) or _describe_allowed_values(field.annotation),
            " ".join((field.description or "").split()),
        )
        for name, field in _walk_setting_fields(RunConfig)
    ]
    if not pattern:
        return lines
    chosen = [line for line in lines if line[0] == pattern or line[0].startswith(f"{pattern}.")]
    words = pattern.lower().split()
    options = [(f"{OPTIONS}.{name}", "", "", meaning) for name, meaning in MEANINGS.items()]
    chosen = chosen or [
        line
        for line in [*lines, *options]
        if all(word in f"{line[0]} {line[3]}".lower() for word in words)
    ]
    if not chosen:
        sections = list(RunConfig.model_fields)
        names = [*sections, *(line[0] for line in lines)]
        matches = difflib.get_close_matches(pattern, names, n=1, cutoff=0.5)
        hint = (
            f"did you mean {matches[0]}?" if matches else f"the sections are {', '.join(sections)}"
        )
        raise ConfigError(f"no setting, section or description has {pattern!r}; {hint}")
    return chosen


def _list_data_options(kind_or_option: str) -> list[tuple[str, str, str, str]]:
    """Return the options of one kind of data, one option of every kind that has it, or all options of all kinds."""
    from inspect import signature

    from colonnade.data import SOURCES

    is_kind = kind_or_option in SOURCES
    if kind_or_option and not is_kind and kind_or_option not in MEANINGS:
        names = sorted(SOURCES) + sorted(MEANINGS)
        raise ConfigError(
            f"unknown kind of data or option {kind_or_option!r}; {suggest_nearest(kind_or_option, names)}"
        )
    lines = []
    for name in [kind_or_option] if is_kind else sorted(SOURCES):
        for option in signature(SOURCES[name]).parameters.values():
            if option.name != "path" and kind_or_option in ("", name, option.name):
                default = "none" if option.default is None else str(option.default).lower()
                default = default if len(default) < 40 else f"{default[:37]}..."
                setting = f"{OPTIONS}.{option.name}"
                title = setting if is_kind else f"{name}: {setting}"
                lines.append((title, default, "", MEANINGS[option.name]))
    return lines


def _walk_setting_fields(config_section: Any, name_prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, field) of every setting; a nested section comes before its own settings."""
    for name, field in config_section.model_fields.items():
        inner = _section_class(field.annotation)
        if name_prefix or not hasattr(inner, "model_fields"):
            yield f"{name_prefix}{name}", field
        if hasattr(inner, "model_fields"):
            key = "NAME." if get_origin(field.annotation) is dict else ""
            yield from _walk_setting_fields(inner, f"{name_prefix}{name}.{key}")


def _section_class(annotation: Any) -> Any:
    """Return the section class of an annotation, also inside an optional or a mapping; else the annotation."""
    return next((a for a in get_args(annotation) if hasattr(a, "model_fields")), annotation)


def _format_default(default: Any) -> str:
    if default is None:
        return "none"
    if hasattr(default, "model_fields_set"):
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def _describe_own_values(field: Any) -> str:
    """Return the description that the field's own type gives of its values; "" if none."""
    return next((part.words for part in field.metadata if isinstance(part, SettingWords)), "")


def _describe_allowed_values(type_annotation: Any) -> str:
    """Describe the values of a type."""
    if hasattr(type_annotation, "model_fields"):
        return "a section"
    origin = get_origin(type_annotation)
    inner = get_args(type_annotation)
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (Union, types.UnionType):
        return " | ".join("none" if a is type(None) else _describe_allowed_values(a) for a in inner)
    if origin is Annotated:
        words = [part.words for part in inner if isinstance(part, SettingWords)]
        return words[0] if words else _describe_allowed_values(inner[0])
    if origin is list:
        return f"list of {_describe_allowed_values(inner[0])}" if inner else "list"
    if origin is tuple:
        return ", ".join(_describe_allowed_values(a) for a in inner if a is not Ellipsis)
    names = {int: "integer", float: "number", str: "text", bool: "true | false", dict: "mapping"}
    return names.get(
        origin or type_annotation, getattr(type_annotation, "__name__", str(type_annotation))
    )


def suggest_nearest(name: str, names: Sequence[str]) -> str:
    """Suggest the known name nearest to `name`; all known names if none is near."""
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {matches[0]}?" if matches else f"choose from {', '.join(names)}"
