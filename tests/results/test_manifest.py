"""A manifest says which data, settings and code a run had, and in what two runs differ."""

import json
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from labsupport.config import ModelConfig, TrainConfig
from labsupport.results import RunManifest, differences
from labsupport.results.manifest import canonical_json, git_state

FACTS = {
    "dataset_sha256": "d" * 64,
    "tokenizer_sha256": "e" * 64,
    "config": {"model": ModelConfig.named("tiny"), "train": TrainConfig()},
    "strategy": "ddp",
    "world_size": 2,
    "seed": 0,
    "hardware": "2 CPU cores",
}


@pytest.fixture(scope="module")
def run():
    return RunManifest.collect(**FACTS)


def test_it_holds_what_a_run_needs_to_be_run_again(run):  # A24
    content = run.to_dict()
    assert {**FACTS, "config": content["config"]}.items() <= content.items()
    assert content["config"]["model"]["num_layers"] == 4
    assert re.fullmatch("[0-9a-f]{64}", content["config_sha256"])
    assert {"python", "system", "labsupport", "torch", "transformers"} <= set(run.versions)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", run.started_at)


def test_reading_gives_what_was_written(run, tmp_path):
    file = run.write(tmp_path / "deep" / "manifest.json")
    again = RunManifest.read(file)
    assert again == run
    assert hash(again) == hash(run)
    assert [path.name for path in file.parent.iterdir()] == ["manifest.json"]


def test_one_configuration_has_one_hash():
    assert canonical_json({"b": 1.0, "a": (1, 2)}) == '{"a":[1,2],"b":1}'
    first, second = (
        RunManifest.collect(**FACTS | {"config": config})
        for config in ({"lr": 3e-3, "n": {"x": 1, "y": 2}}, {"n": {"y": 2.0, "x": 1}, "lr": 0.003})
    )
    assert first.config_sha256 == second.config_sha256
    third = RunManifest.collect(**FACTS | {"config": {"lr": 3e-3, "n": {"x": 1, "y": 3}}})
    assert third.config_sha256 != first.config_sha256


def test_the_hash_is_pinned():
    """A change here would make every kept run look different from every new one."""
    known = RunManifest.collect(**FACTS | {"config": {"seq_len": 128, "lr": 0.003}})
    assert known.config_sha256.startswith("0766565f7e9e911b")


def test_two_runs_differ_in_named_fields(run):
    deeper = ModelConfig.named("15m")
    config = {"model": deeper, "train": TrainConfig()}
    other = RunManifest.collect(**FACTS | {"config": config, "seed": 1})
    assert differences(run, other) == {
        "config.model.head_dim": (32, 64),
        "config.model.hidden_size": (128, 512),
        "config.model.intermediate_size": (384, 1536),
        "config.model.num_heads": (4, 8),
        "config.model.num_kv_heads": (2, 4),
        "seed": (0, 1),
    }
    assert differences(run, replace(run, started_at="2020-01-01T00:00:00+00:00")) == {}
    older = replace(run, versions={**run.versions, "torch": "1.0"}, config={"a": 1})
    assert differences(run, older)["versions.torch"] == (run.versions["torch"], "1.0")
    assert differences(run, older)["config.a"] == (None, 1)


def test_it_is_frozen(run):
    with pytest.raises(FrozenInstanceError):
        run.seed = 1


def git(folder, *args):
    subprocess.run(["git", "-C", folder, *args], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "first")
    return tmp_path


def test_the_revision_and_whether_the_code_was_changed_since(repository):
    revision, dirty = git_state(repository / "code.py")
    assert re.fullmatch("[0-9a-f]{40}", revision)
    assert dirty is False
    (repository / "code.py").write_text("2")
    assert git_state(repository / "code.py") == (revision, True)


def test_no_revision_outside_a_repository_or_for_an_installed_copy(repository, monkeypatch):
    (repository / "installed.py").write_text("1")
    assert git_state(repository / "installed.py") == (None, None)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(repository))
    (repository / "below").mkdir()
    assert git_state(repository / "below" / "code.py") == (None, None)
    monkeypatch.setenv("PATH", "")
    assert git_state(repository / "code.py") == (None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": {"f": print}}, "config holds what JSON cannot"),
        ({"config": {"lr": float("nan")}}, "config holds what JSON cannot"),
        ({"world_size": 0}, "world_size=0 must be at least 1, for example"),
        ({"seed": -1}, "seed=-1 must be at least 0, for example"),
        ({"dataset_sha256": ""}, "dataset_sha256='' must be a word or hash, for example"),
        ({"hardware": None}, "hardware=None must be a word"),
    ],
)
def test_what_is_no_manifest_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        RunManifest.collect(**FACTS | change)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"seed": 1}'])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, content):
    file = tmp_path / "manifest.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"manifest.*RunManifest\.write") as caught:
        RunManifest.read(file)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot be read"):
        RunManifest.read(tmp_path / "none.json")


def test_an_edited_configuration_is_noticed(run, tmp_path):
    file = run.write(tmp_path / "manifest.json")
    content = json.loads(file.read_text())
    content["config"]["train"]["learning_rate"] = 1.0
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="it was edited"):
        RunManifest.read(file)


def test_results_need_only_the_standard_library():
    root = Path(__file__).parents[2]
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r}); import labsupport.results as r;"
        "r.RunManifest.collect(dataset_sha256='a', tokenizer_sha256='b', config={}, strategy='x',"
        " world_size=1, seed=0, hardware='c'); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "False"
