"""Exports for Triton and for the Hub: checked by form, and by scoring with what they contain."""

from __future__ import annotations

import json
import runpy

import numpy as np
import pytest
import torch
import triton_stub
import yaml
from google.protobuf import text_format
from test_export_programs import first_batch, runs  # noqa: F401
from tritonclient.grpc import model_config_pb2
from typer.testing import CliRunner

from colonnade import ConfigError, Predictor
from colonnade.cli.app import app
from colonnade.export import export_model, list_model_inputs, score_tensors, to_tensors
from colonnade.export.hub import format_card
from colonnade.export.tensors import ProgramInput
from colonnade.export.triton import format_model_config
from colonnade.publish.model_files import read_export


@pytest.fixture(scope="module")
def triton(runs, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("models") / "ctr"
    assert export_model(runs("dlrm"), folder, triton=True) == folder / "1"
    return folder


def test_the_configuration_is_one_of_tritons(triton):
    text = (triton / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("ctr", "python", 0)
    with Predictor.open(triton / "1") as predictor:
        inputs = list_model_inputs(predictor)
    assert [i.name for i in config.input] == [i.name for i in inputs]
    kinds = {"float32": model_config_pb2.TYPE_FP32, "int64": model_config_pb2.TYPE_INT64}
    assert [i.data_type for i in config.input] == [kinds[i.dtype] for i in inputs]
    assert [list(i.dims) for i in config.input] == [[-1, *i.shape[1:]] for i in inputs]
    (output,) = config.output
    assert (output.name, output.data_type) == ("score", model_config_pb2.TYPE_FP64)
    assert list(output.dims) == [-1]


def test_names_of_any_characters_are_quoted():
    names = ['a "quoted" \\ name', "line\nbreak", "größe ✓", "F.lengths"]
    inputs = [ProgramInput(name, "int64", ("batch",)) for name in names]
    config = text_format.Parse(
        format_model_config(names[0], inputs, ["a", "b"]), model_config_pb2.ModelConfig()
    )
    assert [i.name for i in config.input] == names and config.name == names[0]
    assert list(config.output[0].dims) == [-1, 2]


def test_model_py_scores_under_tritons_api(triton, monkeypatch):
    triton_stub.install(monkeypatch)
    model = runpy.run_path(str(triton / "1" / "model.py"))["TritonPythonModel"]()
    model.initialize({"model_repository": str(triton), "model_version": "1", "model_name": "ctr"})
    predictor = Predictor.open(triton / "1")
    inputs = list_model_inputs(predictor)
    batches = [first_batch(size) for size in (13, 1)]
    arrays = [
        {name: tensor.numpy() for name, tensor in to_tensors(batch, inputs).items()}
        for batch in batches
    ]
    wrong = {**arrays[0], inputs[1].name: np.full(13, 50)}
    short = {k: v for k, v in arrays[0].items() if k != inputs[2].name}
    kinds = {**arrays[0], inputs[1].name: np.zeros(13, np.int32)}
    columns = {k: v[:, None] if k == inputs[1].name else v for k, v in arrays[0].items()}
    requests = [*arrays, columns, wrong, short, kinds, {**arrays[0], "other": np.zeros(13)}]
    responses = model.execute([triton_stub.InferenceRequest(tensors) for tensors in requests])
    for response, batch in zip(responses, [*batches, batches[0]], strict=False):
        (output,) = response.output_tensors()
        assert output.name() == "score" and output.as_numpy().dtype == np.float64
        assert np.array_equal(output.as_numpy(), predictor(batch).numpy()[:, 0])
    errors = [response.error() for response in responses[3:]]
    assert {error.code() for error in errors} == {triton_stub.TritonError.INVALID_ARG}
    for error, words in zip(
        errors, ("got id 50, wanted 0 .. 49", "got no input", "got int32", "got an input 'other'"), strict=True
    ):  # fmt: skip
        assert words in error.message()
    model.finalize()


def test_arrays_with_nan_are_refused(triton):
    with Predictor.open(triton / "1") as predictor:
        tensors = to_tensors(first_batch(3), list_model_inputs(predictor))
        arrays = {name: tensor.numpy().copy() for name, tensor in tensors.items()}
        assert score_tensors(predictor, arrays).shape == (3,)
        arrays["dense"][1, 0] = np.nan
        with pytest.raises(ValueError, match="input 'dense': got NaN or inf"):
            score_tensors(predictor, arrays)


def front_matter(text):
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_a_folder_for_the_hub(runs, tmp_path):  # noqa: F811
    run = runs("dlrm")
    folder = export_model(run, tmp_path / "my-model", hub=True)
    front, body = front_matter((folder / "README.md").read_text())
    assert front["library_name"] == "colonnade" and "dlrm" in front["tags"]
    (entry,) = front["model-index"]
    (result,) = entry["results"]
    metrics = {metric["type"]: metric["value"] for metric in result["metrics"]}
    last = [
        line
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if line.get("kind") == "evaluate"
    ][-1]
    names = ("auc", "log_loss", "normalized_entropy", "calibration", "expected_calibration_error")
    assert {f"test_{name}" for name in names} <= set(metrics)
    assert all(last[name] == value for name, value in metrics.items())
    assert not {"step", "time", "test_num_samples"} & set(metrics)
    assert "test_auc" in metrics and f"{metrics['test_auc']:.6g}" in body
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "dlrm" and config["model"]["top"] == [64, 64]
    with Predictor.open(folder) as predictor, Predictor.open(run) as original:
        batch = first_batch(13)
        assert torch.equal(predictor(batch), original(batch))
        assert [i["name"] for i in config["inputs"]] == [
            i.name for i in list_model_inputs(predictor)
        ]
    for line in body.splitlines():
        if line.startswith("| `") and ".safetensors" in line:
            assert (folder / line.split("`")[1]).exists()


def test_a_card_of_odd_names_is_still_a_table(runs, tmp_path):  # noqa: F811
    folder = export_model(runs("lr"), tmp_path / "plain")
    inputs = [ProgramInput("a | b\n`c`", "int64", ("batch",))]
    front, body = front_matter(format_card("x: [y] --- z", read_export(folder), inputs, {}))
    assert "model-index" not in front and "recorded none" in body
    assert r"| `a \| b 'c'` | int64 | (batch,) |" in body


def test_the_command(runs, tmp_path):  # noqa: F811
    run, out = str(runs("lr")), tmp_path / "ctr"
    command = ["export", run, str(out), "--torch", "--triton", "--hub"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    names = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert names >= {
        "config.pbtxt", "1/model.py", "1/model.json", "1/model.pt2", "1/dense.pt2", "1/program.json", "1/README.md",
        "1/config.json",
    }  # fmt: skip
    assert "--model-repository" in result.output
    with pytest.raises(ConfigError, match="exists"):
        export_model(run, out, triton=True)
