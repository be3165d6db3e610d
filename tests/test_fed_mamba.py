"""FedAvg of a LoRA on a recurrent backbone, whole, on a tiny random Mamba."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

import fednl
from fednl.client import Bench
from fednl.config import Config, load_config
from fednl.errors import BackboneError
from fednl.federation.algorithms import PRESETS
from fednl.federation.checkpoint import read_tensors
from fednl.models.lora import lora_params
from fednl.models.recurrent import RecurrentCache
from fednl.training import train
from small_run import byte_tokenizer, settings, tiny_backbone

pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference.*")


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_backbone(tmp_path_factory.mktemp("mamba"))  # for its filler
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = MambaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, state_size=4, pad_token_id=0, eos_token_id=1
    )
    MambaForCausalLM(config).save_pretrained(folder)
    return folder


def fed_mamba(folder: Path) -> Config:
    return settings(
        folder,
        data={"tokens": 430, "clients": 2, "train": 2, "validation": 1, "test": 1, "events": 2},
        memory=PRESETS["fed-mamba"]["memory"],  # the tiny run's own would win over the preset's
        lora={"rank": 2},
        training={"rounds": 2, "local-steps": 1},
        federation={"preset": "fed-mamba"},
        evaluation={"arms": ["full-attention", "federated"]},
    )


def test_a_lora_on_mamba_is_trained_averaged_measured_and_loaded(mamba: Path, tmp_path: Path) -> None:
    run = train(fed_mamba(mamba), tmp_path / "run")
    params, _ = read_tensors(run.path / "final/params.safetensors")
    assert {name.split(".", 2)[2] for name in params} == {
        f"{module}.lora_{factor}" for module in ("in_proj", "x_proj") for factor in "AB"
    }
    assert all(bool(tensor.abs().max() > 0) for tensor in params.values())
    rows = run.read_json("results/needles.json")["rows"]
    values = {
        row["method"]: row["value"] for row in rows if (row["client"], row["metric"]) == ("macro", "nats_per_token")
    }
    assert values["federated"] != values["full-attention"]
    assert run.read_json("partition.json")["backbone"]["architecture"] == "MambaForCausalLM"
    assert "heads" not in run.read_json("partition.json")["backbone"]
    model, _ = fednl.load(run.path)
    assert all(torch.equal(live, params[name]) for name, live in lora_params(model).items())


def test_answers_with_the_cache_are_those_of_whole_passes(mamba: Path) -> None:
    bench = Bench(fed_mamba(mamba))
    bench.mount("bare")
    for outcome, example in zip(
        bench.score("full-attention", "passkey", {}, lambda facts: None), bench.data["passkey"].test, strict=True
    ):
        gold = example.candidate_ids[example.gold]
        ids = torch.tensor([[*example.prompt_ids, *gold]])
        with torch.no_grad():
            logprobs = bench.model(ids).logits[0, -len(gold) - 1 : -1].log_softmax(-1)
        expected = -logprobs.gather(1, torch.tensor(gold)[:, None]).mean()
        assert outcome.nats_per_token == pytest.approx(float(expected), abs=1e-6)


def test_the_cache_repeats_rows_and_goes_on_with_them(mamba: Path) -> None:
    model = Bench(fed_mamba(mamba)).model
    ids = torch.arange(2, 22).reshape(2, 10)
    with torch.no_grad():
        whole = model(ids).logits[:, -1].repeat_interleave(3, 0)
        cache = RecurrentCache(model)
        model(ids[:, :-1], cache=cache, use_cache=True)
        cache.batch_repeat_interleave(3)
        step = model(ids[:, -1:].repeat_interleave(3, 0), cache=cache, use_cache=True).logits[:, -1]
    torch.testing.assert_close(step, whole, rtol=0, atol=1e-5)


def test_memory_on_mamba_is_refused_by_name(mamba: Path) -> None:
    bench = Bench(settings(mamba, data={"clients": 1, "train": 1, "validation": 0, "test": 1}))
    with pytest.raises(BackboneError, match="'mamba' is not supported by the memory adapter"):
        bench.mount("own")


def test_the_shipped_settings_are_the_preset() -> None:
    told = load_config("configs/fed-mamba.toml").to_dict()
    assert PRESETS["fed-mamba"]["federation"].items() <= {**told["federation"], "adapters": "lora"}.items()
    assert PRESETS["fed-mamba"]["memory"].items() <= told["memory"].items()
    assert PRESETS["fed-mamba"]["lora"].items() <= told["lora"].items()
