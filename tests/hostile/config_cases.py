"""Settings that cannot work: from --set, and from YAML files."""

from __future__ import annotations

from case import Case, train

BAD_VALUES = {
    "data.name": ["netflix", "3", "[]"],
    "data.options": ["5", "x"],
    "model.name": ["dlmr", "", "7"],
    "model.dim": ["0", "-4", "1.5", "wide"],
    "model.compile": ["maybe"],
    "model.bottom": ["[0]", "[-3]", "64", "[a]"],
    "model.top": ["[0]", "{}", "x"],
    "embedding.optimizer": ["adagard", "none", "5"],
    "embedding.lr": ["-1", "inf", "nan", "fast"],
    "embedding.eps": ["0", "-1"],
    "embedding.weight_decay": ["-1"],
    "embedding.momentum": ["1", "-0.1"],
    "embedding.betas": ["0.9", "[0.9]", "[0.9, 0.9, 0.9]"],
    "embedding.dtype": ["float8", "float64", "32"],
    "embedding.init_scale": ["-1", "inf"],
    "embedding.max_norm": ["0", "-1"],
    "embedding.weight_bound": ["0", "-1"],
    "embedding.admission.updates": ["1", "256", "2.5", "often"],
    "embedding.admission.probability": ["0", "1", "nan", "-0.5"],
    "embedding.admission.error": ["0", "0.9", "x"],
    "embedding.eviction.max_rows": ["0", "-1", "many", "1.5"],
    "embedding.eviction.age_steps": ["0", "x"],
    "embedding.eviction.by": ["size", "lfu"],
    "embedding.tables": ["5", "[a]"],
    "embedding.by_table": ["5", "[a]"],
    "embedding.by_table.C1.lr": ["-1", "fast"],
    "embedding.by_table.C1.optimizer": ["adamm"],
    "dense.optimizer": ["adamm", "lbfgs"],
    "dense.lr": ["-0.1", "nan", "x"],
    "plan.memory.dram": ["3XB", "-1", "0", "GiB", "1.5.2GiB"],
    "plan.lookahead": ["-1", "x", "1.5"],
    "plan.staleness_steps": ["-1", "x", "unbounded"],
    "plan.tables.C1.staleness_steps": ["-1", "x", "unbounded"],
    "embedding.tables.C1.rows": ["0", "many"],
    "embedding.tables.C1.hashes": ["0", "17"],
    "plan.exchange": ["poled", "rwos", "replicated"],
    "train.batch_size": ["0", "-8", "1.5", "many"],
    "train.epochs": ["-1", "0.5"],
    "train.max_steps": ["-1", "x"],
    "train.checkpoint_steps": ["-1"],
    "train.keep_checkpoints": ["0", "-1"],
    "train.seed": ["-1", "99999999999999999999999", "x"],
    "train.on_non_finite": ["ignore"],
    "train.loss_scale": ["0", "-8", "nan", "inf", "dynamical", "true", "1e-300", "1e30"],
    "train.threads": ["-1", "x"],
}
SMALL = (
    "--data",
    "synthetic",
    "--set",
    "data.options.num_train=9000",
    "--set",
    "data.options.num_test=100",
)
MISSPELT = {
    "train.epoch": "train.epochs",
    "train.batchsize": "train.batch_size",
    "model.dims": "model.dim",
    "embedding.learning_rate": "unknown setting",
    "embedding.eviction.max_row": "embedding.eviction.max_rows",
    "embedding.evictions": "embedding.eviction",
    "plan.dramm": "plan.memory.dram",
    "data.nam": "data.name",
    "trian.epochs": "train",
    "train": "train",
    "train.epochs.more": "train.epochs",
    "data.options.num_trian": "num_train",
    "data.option.num_train": "data.options",
    "": "name=value",
}
YAML = {
    "not yaml": (b"train: [1, 2", "not YAML"),
    "tabs": (b"train:\n\tepochs: 3\n", "not YAML"),
    "a list": (b"- train\n- data\n", "sections"),
    "a number": (b"3\n", "sections"),
    "text": (b"just words\n", "sections"),
    "binary": (bytes(range(128, 256)), "not YAML"),
    "a table with an unknown setting": (
        b"embedding:\n  tables: {C1: {evict: {}}}\n",
        "embedding.tables.C1.eviction",
    ),
    "counts without ids": (b"embedding:\n  admission: {updates: 3}\n", "expected_ids"),
    "two admissions": (
        b"embedding:\n  admission: {updates: 3, expected_ids: 9, probability: 0.5}\n",
        "wanted one of them",
    ),
    "an age in no order of ages": (
        b"embedding:\n  eviction: {max_rows: 3, by: norm, age_steps: 2}\n",
        "by=recency",
    ),
    "halving of no counts": (
        b"embedding:\n  eviction: {max_rows: 3, halve_steps: 2}\n",
        "by=frequency",
    ),
    "an order without a limit": (b"embedding:\n  eviction: {by: norm}\n", "max_rows"),
    "an unknown section": (b"trainer:\n  epochs: 3\n", "train"),
    "an unknown key": (b"train:\n  epoch: 3\n", "train.epochs"),
    "a section that is a number": (b"train: 3\n", "train"),
    "a section that is a list": (b"model: [1]\n", "model"),
    "a text for a number": (b"train:\n  epochs: many\n", "train.epochs"),
    "two faults": (b"train:\n  epochs: -1\n", "train.epochs"),
    "an alias to nothing": (b"train: *base\n", "not YAML"),
    "a python object": (b"train: !!python/object:os.system {}\n", "not YAML"),
    "a key that is a list": (b"? [1, 2]\n: 3\n", "not YAML"),
    "a date": (b"train:\n  epochs: 2020-01-01\n", "train.epochs"),
    "a null name": (b"data:\n  name: null\n", "data.name"),
    "a staleness in words": (b"plan:\n  cache: {staleness: exact}\n", "wanted a number of batches"),
    "a nested option": (b"data:\n  name: synthetic\n  options: {num_train: {a: 1}}\n", "num_train"),
}


def cases() -> list[Case]:
    listed = []
    for name, values in BAD_VALUES.items():
        for value in values:
            word = name if name not in ("data.name", "plan.exchange") else ""
            listed.append(
                Case(f"--set {name}={value}", train("synthetic", None, f"{name}={value}"), (word,))
            )
    for name, word in MISSPELT.items():
        listed.append(Case(f"--set {name}=1", train("synthetic", None, f"{name}=1"), (word,)))
    for name, (content, word) in YAML.items():
        listed.append(
            Case(
                f"yaml {name}",
                ("train", "run.yaml", "--run", "run"),
                # An option is checked by its source, which does not know where it was written.
                (word,) if "option" in name else ("run.yaml", word),
                {"run.yaml": content},
            )
        )
    listed += [
        Case(
            "eviction without an open table",
            train("synthetic", None, "embedding.eviction.max_rows=9"),
            ("embedding.eviction", "no open table"),
        ),
        Case(
            "eviction of a table that is not there",
            ("train", "run.yaml", "--run", "run"),
            ("embedding.tables.word", "no open table of that name"),
            {
                "run.yaml": b"data: {name: synthetic}\nembedding:\n  tables: {word: {eviction: {age_steps: 3}}}\n"
            },
        ),
        Case("yaml nowhere", ("train", "nowhere.yaml"), ("nowhere.yaml",)),
        Case("yaml is a folder", ("train", "place", "--run", "run"), ("place",), {"place/x": b""}),
        Case(
            "plan.memory.ssd is a file",
            train("synthetic", None, "plan.memory.ssd=place/rows:1GiB"),
            ("plan.memory.ssd", "place is a file"),
            {"place": b""},
        ),
        Case(
            "plan.memory.mapped beyond its disk",
            train("synthetic", None, "plan.memory.mapped=here:900TiB", "plan.memory.dram=1MiB"),
            ("plan.memory.mapped", "the file system has"),
        ),
        Case(
            "plan.memory.mapped without plan.memory.dram",
            train("synthetic", None, "plan.memory.mapped=here:1GiB"),
            ("plan.memory.mapped", "without plan.memory.dram"),
        ),
        Case(
            "plan.memory.mapped of no bytes",
            train("synthetic", None, "plan.memory.mapped=here:0", "plan.memory.dram=1MiB"),
            ("plan.memory.mapped", "at least 1 byte"),
        ),
        Case(
            "--dram of no size",
            ("train", "--data", "synthetic", "--run", "run", "--dram", "much"),
            ("plan.memory.dram", "much"),
        ),
        Case("plan of a file that is not there", ("plan", "nowhere.yaml"), ("nowhere.yaml",)),
        Case("plan of a data set nobody knows", ("plan", "--data", "netflix"), ("netflix",)),
        Case(
            "plan with memory below one batch",
            ("plan", *SMALL, "--dram", "300KiB"),
            ("plan.memory.dram", "for a batch", "C"),
        ),
        Case(
            "plan with memory below a row of each table",
            ("plan", *SMALL, "--dram", "1KiB"),
            ("plan.memory.dram", "one row of each of 26 tables"),
        ),
        Case(
            "plan with a file for a directory",
            ("plan", *SMALL, "--dram", "4MiB", "--set", "plan.memory.ssd=place:1GiB"),
            ("plan.memory.ssd", "place is a file"),
            {"place": b""},
        ),
        Case(
            "plan of no samples",
            ("plan", "--data", "synthetic", "--set", "data.options.num_train=0", "--dram", "4MiB"),
            ("num_train",),
        ),
        Case("plan for no ranks", ("plan", *SMALL, "--ranks", "0"), ("--ranks",)),
        Case(
            "plan for ranks and a world",
            ("plan", *SMALL, "--ranks", "4", "--world", "2x2"),
            ("--ranks 4", "--world 2x2"),
        ),
        Case(
            "plan for a link that nobody uses",
            ("plan", *SMALL, "--uplink", "1Gbit"),
            ("--uplink", "--world 2x1"),
        ),
        Case("plan of no lookups", ("plan", *SMALL, "--sample", "0"), ("--sample",)),
        Case(
            "a run with memory below one batch",
            train(
                "synthetic",
                None,
                "plan.memory.dram=300KiB",
                "data.options.num_train=9000",
            ),
            ("plan.memory.dram", "for a batch"),
        ),
        Case("--set without =", ("train", "--set", "epochs"), ("name=value",)),
        Case(
            "--set of a setting of another optimizer",
            train("synthetic", None, "embedding.l1=0.1"),
            ("embedding.l1",),
        ),
        Case(
            "option of a synthetic stream",
            train("synthetic", None, "data.options.exponent=-1"),
            ("exponent",),
        ),
        Case("no samples", train("synthetic", None, "data.options.num_train=0"), ("num_train",)),
    ]
    return listed
