"""Criteo files at fault: one field, one line, or the whole file."""

from __future__ import annotations

from case import Case, train
from criteo_files import criteo_lines

LINES = criteo_lines(12, seed=1)
AT = 5  # the line at fault, counted from 1; the first and the last are looked at when the file is opened
FAST = ("train.batch_size=4", "data.options.test_fraction=0")


def _file(lines: list[str]) -> dict[str, bytes]:
    return {"train.txt": "".join(f"{line}\n" for line in lines).encode()}


def _with_line(line: str, at: int = AT) -> dict[str, bytes]:
    return _file([*LINES[: at - 1], line, *LINES[at:]])


def _with_field(column: int, value: str) -> str:
    fields = LINES[AT - 1].split("\t")
    fields[column] = value
    return "\t".join(fields)


def _names() -> list[str]:
    return ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]


def cases() -> list[Case]:
    command = train("criteo", "train.txt", *FAST)
    listed = []
    bad_labels = ["", "2", "-1", "0.5", "nan", "yes", "\u0661"]
    bad_counts = ["x", "--1", "0x10", "-", "1 2", "inf"]
    for values, column in ((bad_labels, 0), (bad_counts, 1), (bad_counts, 7), (bad_counts, 13)):
        name = _names()[column]
        for value in values:
            listed.append(
                Case(
                    f"criteo {name} {value!a}",
                    command,
                    ("train.txt", f"line {AT}", f"column {name}", "got", "wanted"),
                    _with_line(_with_field(column, value)),
                    may_leave=("run",),
                )
            )
    shapes = {
        "too few columns": "\t".join(LINES[0].split("\t")[:39]),
        "too many columns": LINES[0] + "\tx",
        "one column": "1",
        "empty line": "",
        "commas": LINES[0].replace("\t", ","),
        "spaces": LINES[0].replace("\t", "    "),
        "a header": "\t".join(_names()),
        "a carriage return inside": LINES[0].replace("\t", "\r\t", 3),
        "a quote": '"' + LINES[0],
        "only tabs": "\t" * 39,
    }
    for name, line in shapes.items():
        for at in (1, AT, 12):
            listed.append(
                Case(
                    f"criteo {name} at line {at}",
                    command,
                    ("train.txt", f"line {at}", "got", "wanted"),
                    _with_line(line, at),
                    may_leave=("run",),
                )
            )
    whole = {
        "empty": (b"", "empty"),
        "gzip": (b"\x1f\x8b\x08\x00" + b"x" * 100, "gzip"),
        "binary": (bytes(range(256)) * 4, "binary"),
        "one newline": (b"\n", "line 1"),
        "a header only": (("\t".join(_names()) + "\n").encode(), "line 1"),
        "utf-16": ("\n".join(LINES).encode("utf-16"), "UTF-16"),
        "cut inside the last line": ("\n".join(LINES).encode()[:-200], "line 12"),
    }
    for name, (content, word) in whole.items():
        listed.append(
            Case(
                f"criteo file {name}",
                command,
                ("train.txt", word),
                {"train.txt": content},
                ("run",),
            )
        )
    listed += [
        Case("criteo nowhere", train("criteo", "nowhere.txt"), ("nowhere.txt", "no file")),
        Case(
            "criteo folder without the file",
            train("criteo", "data"),
            ("train.txt", "data"),
            {"data/other.txt": b"1\n"},
        ),
        Case(
            "criteo fraction 1",
            train("criteo", "train.txt", "data.options.test_fraction=1"),
            ("test_fraction", "wanted"),
            _file(LINES),
        ),
        Case(
            "criteo fraction negative",
            train("criteo", "train.txt", "data.options.test_fraction=-0.1"),
            ("test_fraction",),
            _file(LINES),
        ),
        Case(
            "criteo fraction text",
            train("criteo", "train.txt", "data.options.test_fraction=half"),
            ("test_fraction", "half"),
            _file(LINES),
        ),
        Case(
            "criteo schema without fields",
            train("criteo", "train.txt", "data.options.schema={}"),
            ("fields",),
            _file(LINES),
        ),
        Case(
            "criteo unknown option",
            train("criteo", "train.txt", "data.options.threds=5"),
            ("threds", "threads"),
            _file(LINES),
        ),
    ]
    return listed
