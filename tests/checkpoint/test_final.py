"""The checkpoint at the end of a run is whole or not there, and holds nothing that runs code."""

import pytest
import torch

from labsupport.checkpoint import full_optimizer_state_dict, full_state_dict, load_final, save_final
from labsupport.config import ModelConfig
from labsupport.model import Llama

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1
)


@pytest.fixture
def kept():
    torch.manual_seed(0)
    model = Llama(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    model.loss(torch.arange(8)[None], torch.arange(1, 9)[None]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return {
        "model_state": full_state_dict(model),
        "optimizer_state": full_optimizer_state_dict(model, optimizer),
        "config": {"model": vars(CONFIG)},
        "manifest": {"seed": 0, "versions": {"python": "3"}},
        "step": 1,
    }


def test_what_was_saved_is_loaded(kept, tmp_path):
    save_final(tmp_path / "deep" / "run", **kept)
    again = load_final(tmp_path / "deep" / "run")
    assert (again.config, again.manifest, again.step) == (kept["config"], kept["manifest"], 1)
    assert again.model_state.keys() == kept["model_state"].keys()
    for name, tensor in kept["model_state"].items():
        assert torch.equal(again.model_state[name], tensor)
        first = again.optimizer_state["state"][name]["exp_avg"]
        assert torch.equal(first, kept["optimizer_state"]["state"][name]["exp_avg"])
    assert ModelConfig(**again.config["model"]) == CONFIG


def test_what_could_not_be_loaded_is_not_saved(kept, tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint\['config'\]\['model'\] is a ModelConfig; a"):
        save_final(tmp_path, **kept | {"config": {"model": CONFIG}})
    with pytest.raises(ValueError, match=r"checkpoint\['manifest'\]\['a'\]\[1\] is a function"):
        save_final(tmp_path, **kept | {"manifest": {"a": [1, lambda: 0]}})
    assert not list(tmp_path.iterdir())


def test_a_failed_save_keeps_the_earlier_checkpoint(kept, tmp_path, monkeypatch):
    save_final(tmp_path, **kept)

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space"):
        save_final(tmp_path, **kept | {"step": 2})
    assert load_final(tmp_path).step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["final.pt"]


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04half"])
def test_a_damaged_checkpoint_is_refused(tmp_path, content):
    (tmp_path / "final.pt").write_bytes(content)
    with pytest.raises(ValueError, match="is damaged or no checkpoint; name a folder"):
        load_final(tmp_path)
    torch.save({"step": 1}, tmp_path / "final.pt")
    with pytest.raises(ValueError, match="is damaged or no checkpoint"):
        load_final(tmp_path)
    with pytest.raises(ValueError, match="is missing; name a folder"):
        load_final(tmp_path / "none")
