"""Programs of torch.export: the bits of the predictor, any number of samples, and errors instead of wrong scores."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils import cpp_extension

import colonnade
from colonnade import (
    FM,
    Batch,
    Concat,
    ConfigError,
    DataError,
    EmbeddingCollection,
    Feature,
    Ids,
    Mesh,
    Predictor,
    Table,
    TargetAttention,
)
from colonnade.cli import main
from colonnade.config.run import build_config
from colonnade.data import Splits, open_source, open_tensors
from colonnade.errors import CorruptionError, IdRangeError
from colonnade.export import export_model, list_model_inputs, load_program, to_tensors
from colonnade.export.lookup import format_layout, parse_layout
from colonnade.export.torch_files import write_programs
from colonnade.run.run import open_run

CPP_FOLDER = Path(colonnade.export.__file__).parent / "cpp"
OPTIONS = {"num_train": 600, "num_test": 200, "cardinalities": [50, 900, 7, 3000]}
MODELS = {
    "dlrm": {"dim": 8, "bottom": [64, 64], "top": [64, 64]},
    "deepfm": {"dim": 8, "top": [64, 64]},
    "dcnv2": {"dim": 8, "cross_layers": 2, "top": [64, 64]},
    "wide_deep": {"dim": 8, "top": [64, 64]},
    "nfm": {"dim": 8, "top": [64, 64]},
    "lr": {},
}
TYPICAL = ("dlrm", "wide_deep")
"""One without a linear term, one with; the others are slow."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folder of a trained run of a model, trained once."""
    folders = {}

    def find(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("runs") / name
            config = {
                "data": {"name": "synthetic", "options": OPTIONS},
                "model": {"name": name, **MODELS[name]},
                "train": {"batch_size": 100, "epochs": 1, "threads": 1},
            }
            run = open_run(build_config(config), Mesh(), folders[name])
            run.train()
            run.close()
        return folders[name]

    return find


@pytest.fixture(scope="module")
def dlrm(runs, tmp_path_factory):
    """An export of DLRM with programs."""
    return export_model(runs("dlrm"), tmp_path_factory.mktemp("exports") / "dlrm", torch=True)


def first_batch(size):
    return next(iter(open_source("synthetic", **OPTIONS).test.batches(size)))


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=[pytest.mark.slow] * (m not in TYPICAL)) for m in MODELS]
)
def test_a_program_has_the_bits_of_the_predictor(name, runs, tmp_path):
    folder = export_model(runs(name), tmp_path / name, torch=True)
    program = torch.export.load(folder / "model.pt2").module()
    predictor = Predictor.open(folder)
    inputs = list_model_inputs(predictor)
    for size in (1, 2, 13, 97, 64):
        batch = first_batch(size)
        scores = program(to_tensors(batch, inputs))
        assert scores.dtype == torch.float64 and scores.shape == (size, 1)
        assert torch.equal(scores, predictor(batch)), size
    nothing = {name: tensor[:0] for name, tensor in to_tensors(batch, inputs).items()}
    assert program(nothing).shape == (0, 1)


class Own(nn.Module):
    """Bags, a sequence with attention, an open table with parts, a hash-stacked table, 16-bit rows, two labels."""

    def __init__(self, dtype="float32", master=False):
        super().__init__()
        torch.manual_seed(3)
        kind = {"dtype": dtype, "master": master}
        self.embeddings = EmbeddingCollection(
            [
                Table("item", {"deep": 6, "wide": 2}, **kind),
                Table("tag", 6, rows=50, **kind),
                Table("page", 6, rows=31, hashes=2, **kind),
            ],
            [
                Feature("item", "item"), Feature("history", "item", pooling="sequence"),
                Feature("tags", "tag", pooling="mean"), Feature("more tags", "tag", pooling="sqrtn"),
                Feature("page", "page", pooling="mean"), Feature("pages", "page", pooling="sequence"),
            ],
            consumers={
                "interest": (TargetAttention(heads=2), ["item.deep", "history.deep"]),
                "flat": (Concat(), ["item.deep", "tags", "more tags", "page"]),
                "fm": (FM("ids"), ["item.deep", "tags", "more tags"]),
            },
            seed=5,
        )  # fmt: skip
        self.top = nn.Linear(24 + 6 + 3, 2)

    def forward(self, batch):
        fields = self.embeddings(batch)
        first = torch.cat([fields["flat"], fields["interest"], batch.dense], 1)
        scores = self.top(first.to(self.top.weight)) + fields["item.wide"] + fields["pages"].sum()
        return scores + fields["fm"]


def own_columns(size, seed):
    random = torch.Generator().manual_seed(seed)

    def draw(count, high):
        return torch.randint(0, high, (count,), generator=random)

    def bag(high, scale=1):
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), draw(size, 5).cumsum(0)])
        return Ids(draw(int(offsets[-1]), high) * scale - int(scale > 1), offsets)

    return {
        "ids": {
            "item": draw(size, 400) * 7919 - 1, "history": bag(400, 7919), "tags": bag(50), "more tags": bag(50),
            "page": draw(size, 10**9), "pages": bag(10**9),
        },
        "dense": torch.rand(size, 3, generator=random),
        "label": (torch.rand(size, 2, generator=random) < 0.3).float(),
        "label_names": ["click", "buy"],
        "cardinalities": {"tags": 50, "more tags": 50},
    }  # fmt: skip


def own_batch(size, seed):
    columns = own_columns(size, seed)
    ids = {k: v if isinstance(v, Ids) else Ids(v) for k, v in columns["ids"].items()}
    return Batch(size, columns["dense"], ids)


@pytest.mark.parametrize(
    ("dtype", "master"),
    [
        pytest.param("float32", False, marks=pytest.mark.slow),
        ("bfloat16", True),
        pytest.param("float64", False, marks=pytest.mark.slow),
    ],
)
def test_bags_sequences_and_ids_without_rows(dtype, master, tmp_path):
    """Half of the ids were never trained: their first values must be those of the predictor."""
    data = open_tensors(**own_columns(300, 0), name="own")
    colonnade.fit(
        Own(dtype, master), Splits(train=data), run=tmp_path / "run", epochs=1, batch_size=50, quiet=True
    )  # fmt: skip
    folder = export_model(tmp_path / "run", tmp_path / "out", torch=True, model=Own(dtype, master))
    program = load_program(folder)
    predictor = Predictor.open(folder, model=Own(dtype, master))
    inputs = list_model_inputs(predictor)
    assert [i.name for i in inputs if i.name.endswith(".lengths")] == [
        "history.lengths", "tags.lengths", "more tags.lengths", "pages.lengths",
    ]  # fmt: skip
    for size in (1, 2, 13, 97):
        batch = own_batch(size, size)
        assert torch.equal(program(to_tensors(batch, inputs)), predictor(batch)), size
    empty = own_batch(2, 1)
    for name in ("history", "tags", "more tags", "pages"):
        empty.ids[name] = Ids(torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    assert torch.equal(program(to_tensors(empty, inputs)), predictor(empty))


DENSE_ALONE = """
import sys, torch
program = torch.export.load(sys.argv[1]).module()
inputs, wanted = torch.load(sys.argv[2])
assert not any(name.startswith("colonnade") for name in sys.modules)
for fields, scores in zip(inputs, wanted):
    torch.testing.assert_close(program(fields), scores, rtol=1e-5, atol=1e-6)
print("equal")
"""


def test_the_dense_part_runs_without_colonnade(dlrm, tmp_path):
    predictor = Predictor.open(dlrm)
    collection = predictor.model.embeddings
    inputs, wanted = [], []
    for size in (1, 13, 97):
        batch = first_batch(size)
        names = [feature.name for feature in collection.declaration.features]
        dims = collection.declaration.widths.tolist()
        with torch.no_grad():
            fields = collection(batch)["fields"].split(dims, 1)
        inputs.append({"dense": batch.dense, **dict(zip(names, fields, strict=True))})
        wanted.append(predictor(batch))
    torch.save((inputs, wanted), tmp_path / "batches.pt")
    ended = subprocess.run(
        [sys.executable, "-c", DENSE_ALONE, dlrm / "dense.pt2", tmp_path / "batches.pt"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.stdout == "equal\n", ended.stderr


def test_rows_of_large_tables_stay_in_their_files(dlrm, tmp_path):
    """The program without rows refuses to score by itself; `load_program` gives it the mapped rows."""
    with Predictor.open(dlrm) as predictor:
        programs = write_programs(dlrm, predictor, max_row_bytes=0)
        assert not programs.has_rows
        batch = first_batch(13)
        tensors = to_tensors(batch, list_model_inputs(predictor))
        alone = torch.export.load(dlrm / "model.pt2").module()
        with pytest.raises(CorruptionError, match=r"got rows of shape \(0, 8\).*load_program"):
            alone(tensors)
        assert torch.equal(load_program(dlrm)(tensors), predictor(batch))
        write_programs(dlrm, predictor)


def test_a_compiled_program_of_large_tables_is_refused_at_once(dlrm, tmp_path, monkeypatch):
    """Nothing is traced or written before."""
    monkeypatch.setattr("colonnade.export.torch_files.shutil.which", lambda name: "/usr/bin/c++")
    monkeypatch.setattr("colonnade.export.torch_files.export_program", None)
    folder = tmp_path / "empty"
    shutil.copytree(dlrm, folder, ignore=shutil.ignore_patterns("*.pt2", "program.json"))
    names = {path.name for path in folder.iterdir()}
    with Predictor.open(folder) as predictor:
        with pytest.raises(ConfigError, match=r"got --aoti and [\d,]+ bytes of rows.*--torch"):
            write_programs(folder, predictor, aoti=True, max_row_bytes=1000)
    assert {path.name for path in folder.iterdir()} == names


@pytest.mark.parametrize("name", ["model.pt2", "dense.pt2", "program.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "lose"])
def test_verify_reads_programs(name, harm, dlrm, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "export"
    shutil.copytree(dlrm, folder)
    monkeypatch.setattr(sys, "argv", ["colonnade", "verify", str(folder)])

    def verify() -> tuple[object, str]:
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        return code, capsys.readouterr().out.replace("\n", "")

    code, output = verify()
    num_files = len(list(folder.iterdir()))
    assert not code and f"intact; {num_files} files" in output
    path = folder / name
    content = bytearray(path.read_bytes())
    if harm == "flip":
        content[0 if name == "program.json" else len(content) // 2] ^= 1
        path.write_bytes(content)
    elif harm == "cut":
        path.write_bytes(content[:-5])
    else:
        path.unlink()
    code, output = verify()
    assert code == 2 and f"damaged  {path}" in output


def test_wrong_inputs_are_named(dlrm):
    with Predictor.open(dlrm) as predictor:
        inputs = list_model_inputs(predictor)
    batch = first_batch(3)
    for ids, words in (
        (Ids(torch.arange(3), weights=torch.ones(3)), "got weights of its ids"),
        (
            Ids(torch.arange(4), torch.tensor([0, 1, 2, 4])),
            "got 4 ids for 3 samples, wanted one each",
        ),
    ):
        with pytest.raises(DataError, match=f"feature '{inputs[1].name}': {words}"):
            to_tensors(replace(batch, ids={**batch.ids, inputs[1].name: ids}), inputs)
    program, tensors = load_program(dlrm), to_tensors(first_batch(5), inputs)
    name = inputs[1].name
    with pytest.raises(IdRangeError, match=rf"feature '{name}'.*got id 50, wanted 0 \.\. 49"):
        program({**tensors, name: torch.tensor([0, 1, 50, 2, 3])})
    with pytest.raises(IdRangeError, match="got id -1"):
        program({**tensors, name: torch.tensor([0, 1, -1, 2, 3])})
    with pytest.raises(Exception, match=r"(?i)guard|size|shape|expected"):
        program({**tensors, name: torch.tensor([0, 1])})


@pytest.mark.parametrize("victim", ["model.pt2", "program.json", "rows-1.safetensors"])
def test_a_damaged_export_scores_nothing(victim, dlrm, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in dlrm.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    with Predictor.open(folder) as predictor:
        write_programs(folder, predictor, max_row_bytes=0)
    load_program(folder)
    path = folder / victim
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 16
    path.write_bytes(bytes(content))
    with pytest.raises(CorruptionError, match=victim):
        load_program(folder)
    path.write_bytes(bytes(content[:-7]))
    with pytest.raises(CorruptionError, match=victim):
        load_program(folder)


def test_the_operator_keeps_torchs_contract():
    """torch.library's own checks: schema, fake kernel, dispatch with symbols for sizes."""
    declaration = Own().embeddings.declaration
    several = [f.name in ("history", "tags", "more tags", "pages") for f in declaration.features]
    layout = format_layout(declaration, (3, 0, 31), 5, several)
    assert parse_layout(layout).declaration.features == declaration.features
    assert [t.parts[0].dim for t in parse_layout(layout).declaration.tables] == [6, 6, 6]
    batch = own_batch(4, 1)
    lengths = [
        batch.ids[f.name].counts if is_bag else torch.empty(0, dtype=torch.int64)
        for f, is_bag in zip(declaration.features, several, strict=True)
    ]
    weights = [torch.rand(3, 8), torch.rand(0, 6), torch.rand(31, 6)]
    keys = [torch.tensor([-1, 7918, 15837]), *[torch.empty(0, dtype=torch.int64)] * 2]
    ids = [batch.ids[f.name].values for f in declaration.features]
    torch.library.opcheck(torch.ops.colonnade.lookup, (layout, weights, keys, ids, lengths, 4))
    for wrong in (lengths[1] + 1, -lengths[1], lengths[1][:3]):
        wrong_lengths = [lengths[0], wrong, *lengths[2:]]
        with pytest.raises(DataError, match="feature 'history': got lengths"):
            torch.ops.colonnade.lookup(layout, weights, keys, ids, wrong_lengths, 4)
    for damaged in ("", layout.replace("version 1", "version 2"), layout.replace("table", "tabel")):
        with pytest.raises(CorruptionError, match="layout that is damaged or another version's"):
            torch.ops.colonnade.lookup(damaged, weights, keys, ids, lengths, 4)


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path):
    data = open_tensors(**own_columns(100, 0), name="own")
    settings = {"epochs": 1, "batch_size": 50, "quiet": True}
    colonnade.fit(Own(), Splits(train=data), run=tmp_path / "run", **settings)
    model = Own()
    model.forward = lambda batch: model.embeddings(batch)["flat"][: len(batch.dense)].tolist()
    with pytest.raises(ConfigError, match=r"torch\.export cannot trace Own"):
        export_model(tmp_path / "run", tmp_path / "out", torch=True, model=model)
    model = Own()
    model.objective = SimpleNamespace(monitor="recall", loss=None, evaluate=None)
    with pytest.raises(ConfigError, match="Own has no scores to export"):
        export_model(tmp_path / "run", tmp_path / "out", torch=True, model=model)
    with pytest.raises(ConfigError, match="exists"):
        export_model(tmp_path / "run", tmp_path / "run", torch=True, model=Own())
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


CPP_RUNNER = """
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>
#include <fstream>
#include <iterator>

// package, pickled list of inputs, file for the scores
int main(int, char** words) {
  c10::InferenceMode mode;
  std::ifstream file(words[2], std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  const c10::IValue list = torch::pickle_load(bytes);
  std::vector<at::Tensor> inputs;
  for (const auto& input : list.toListRef()) inputs.push_back(input.toTensor());
  torch::inductor::AOTIModelPackageLoader loader(words[1]);
  const auto scores = torch::pickle_save(loader.run(inputs).at(0));
  std::ofstream(words[3], std::ios::binary).write(scores.data(), scores.size());
}
"""


@pytest.mark.slow
def test_compiled_programs_score_in_python_and_in_cpp(tmp_path):
    data = open_tensors(**own_columns(300, 0), name="own")
    settings = {"epochs": 1, "batch_size": 50, "quiet": True}
    colonnade.fit(Own(), Splits(train=data), run=tmp_path / "run", **settings)
    folder = export_model(tmp_path / "run", tmp_path / "out", aoti=True, model=Own())
    predictor = Predictor.open(folder, model=Own())
    inputs = list_model_inputs(predictor)
    package = torch._inductor.aoti_load_package(str(folder / "model_aoti.pt2"))
    (tmp_path / "main.cpp").write_text(CPP_RUNNER)
    torch_folder = Path(torch.__file__).parent
    headers = [f"-I{torch_folder / 'include'}", f"-I{torch_folder}/include/torch/csrc/api/include"]
    libraries = [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}"]
    libraries += ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    sources = [tmp_path / "main.cpp", folder / "lookup.cpp"]
    flags = ["-std=c++20", "-O1", "-ffp-contract=off"]
    subprocess.run(
        ["g++", *flags, *headers, *sources, *libraries, "-o", tmp_path / "main"], check=True
    )
    for size in (1, 13, 97):
        batch = own_batch(size, size)
        tensors, wanted = to_tensors(batch, inputs), predictor(batch)
        torch.testing.assert_close(package(tensors), wanted)
        torch.save(list(tensors.values()), tmp_path / "inputs.pt")
        files = [folder / "model_aoti.pt2", tmp_path / "inputs.pt", tmp_path / "scores.pt"]
        ended = subprocess.run([tmp_path / "main", *files], capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        torch.testing.assert_close(torch.load(tmp_path / "scores.pt"), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "master"), [("float32", False), ("bfloat16", True), ("float16", False), ("float64", False)]
)  # fmt: skip
def test_the_operator_in_cpp_has_the_same_bits(dtype, master, tmp_path_factory):
    """Both kernels under one dispatcher: C++'s is registered under another name."""
    source = (
        (CPP_FOLDER / "lookup.cpp")
        .read_text()
        .replace("TORCH_LIBRARY(colonnade,", "TORCH_LIBRARY(colonnade_cpp,")
    )
    source = source.replace("TORCH_LIBRARY_IMPL(colonnade,", "TORCH_LIBRARY_IMPL(colonnade_cpp,")
    cpp_extension.load_inline(
        "lookup_cpp", source, extra_cflags=["-ffp-contract=off"], is_python_module=False
    )
    declaration = Own(dtype, master).embeddings.declaration
    several = [f.name in ("history", "tags", "more tags", "pages") for f in declaration.features]
    keys = [
        torch.arange(0, 400, 3) * 7919 - 1, torch.empty(0, dtype=torch.int64), torch.arange(0, 31, 2)
    ]  # fmt: skip
    counts, kind = (len(keys[0]), 50, len(keys[2])), getattr(torch, dtype)
    layout = format_layout(declaration, counts, 5, several)
    weights = [torch.randn(n, width).to(kind) for n, width in zip(counts, (8, 6, 6), strict=True)]
    for size in (0, 1, 2, 97):
        batch = own_batch(max(size, 1), size)
        ids = [batch.ids[f.name].values for f in declaration.features]
        lengths = [batch.ids[f.name].counts for f in declaration.features]
        if size == 0:
            ids, lengths = [i[:0] for i in ids], [n[:0] for n in lengths]
        lengths = [n if is_bag else n[:0] for n, is_bag in zip(lengths, several, strict=True)]
        arguments = (layout, weights, keys, ids, lengths, size)
        result, wanted = (
            torch.ops.colonnade_cpp.lookup(*arguments),
            torch.ops.colonnade.lookup(*arguments),
        )
        for a, b in zip(result, wanted, strict=True):
            assert a.shape == b.shape and torch.equal(a, b)
    ids[2] = torch.full_like(ids[2], 50)
    with pytest.raises(RuntimeError, match="feature 'tags', lookup 0 of the batch: got id 50"):
        torch.ops.colonnade_cpp.lookup(layout, weights, keys, ids, lengths, size)
