from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForSequenceClassification, T5Config

from fednl.errors import BackboneError, SettingsError
from fednl.models.backbone import folder_sha256, load_backbone, pick_device, pick_dtype
from fednl.models.settings import BackboneSettings


def _load(folder: Path | str, **settings: Any) -> Any:
    return load_backbone(BackboneSettings(id=str(folder), device="cpu", **settings))


def _edit(folder: Path, **changed: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


def test_a_folder_loads_frozen_and_named(folder: Path) -> None:
    backbone = _load(folder)
    assert not backbone.model.training
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())
    assert backbone.model.dtype == torch.float32
    assert backbone.tokenizer.model_max_length == 256
    expected = {"name": "a-model", "architecture": "LlamaForCausalLM", "hidden": 32, "layers": 2}
    expected |= {"heads": 4, "kv_heads": 2, "vocab": 64, "sha256": folder_sha256(folder)}
    assert backbone.identity == expected
    assert backbone.model.fednl_name == "a-model"


def test_the_values_are_those_saved(folder: Path, tiny: Any, ids: torch.Tensor) -> None:
    assert torch.equal(_load(folder).model(ids).logits, tiny("llama")(ids).logits)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_weights_are_mapped_not_read(folder: Path) -> None:
    backbone = _load(folder)
    maps = Path("/proc/self/maps").read_text()
    assert str(folder / "model.safetensors") in maps
    assert backbone.model.dtype == torch.float32


def test_dtype_and_device(folder: Path) -> None:
    assert _load(folder, dtype="bfloat16").model.dtype == torch.bfloat16
    assert pick_dtype("float32", torch.device("cuda")) == torch.float32
    native = any(found is True and "bf16" in name for name, found in torch.cpu.get_capabilities().items())
    assert pick_dtype("auto", torch.device("cpu")) == (torch.bfloat16 if native else torch.float32)
    assert pick_dtype("auto", torch.device("mps")) == torch.float32


def test_auto_prefers_float32_where_bfloat16_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False, "avx2": True})
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True, "cpu_name": "bf16"})
    assert pick_dtype("auto", torch.device("cpu")) == torch.bfloat16


def test_auto_prefers_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto").type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto").type == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto").type == "cpu"


@pytest.mark.parametrize("device", ["cuda", "cuda:3", "mps"])
def test_a_device_that_is_not_there_is_an_argument_error(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda:3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=f"backbone.device = '{device}'"):
        pick_device(device)


@pytest.mark.parametrize("special", [{"unk_token": "<unk>"}, {"eos_token": "</s>"}, {}, {"pad_token": "<s>"}])
def test_a13_the_pad_token_is_one_that_exists_and_nothing_is_resized(
    folder: Path, tiny_tokenizer: Any, special: dict[str, str]
) -> None:
    (folder / "tokenizer_config.json").unlink()
    tiny_tokenizer(**special).save_pretrained(folder)
    plain = AutoTokenizer.from_pretrained(folder)
    backbone = _load(folder)
    assert backbone.tokenizer.pad_token == next(iter(special.values()), "<unk>")
    assert len(backbone.tokenizer) == len(plain) == 64
    assert backbone.model.get_input_embeddings().weight.shape == (64, 32)
    assert backbone.identity["vocab"] == backbone.model.config.vocab_size == 64
    assert backbone.model.generation_config.pad_token_id == backbone.tokenizer.pad_token_id


def test_a13_a_pad_token_added_beyond_the_embeddings_is_not_used(folder: Path, tiny_tokenizer: Any) -> None:
    tokenizer = tiny_tokenizer(unk_token="<unk>", pad_token="[PAD]")
    assert tokenizer.pad_token_id == 64
    tokenizer.save_pretrained(folder)
    backbone = _load(folder)
    assert backbone.tokenizer.pad_token == "<unk>"
    assert backbone.model.get_input_embeddings().weight.shape == (64, 32)


def test_a13_a_tokenizer_larger_than_the_embeddings_is_refused(folder: Path, tiny_tokenizer: Any) -> None:
    tiny_tokenizer(words=70, unk_token="<unk>").save_pretrained(folder)
    with pytest.raises(BackboneError, match="6 tokens beyond the model's 64 embeddings"):
        _load(folder)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/nowhere", "a/b/c", "model.gguf", "a b"])
def test_a_path_that_does_not_exist_is_an_argument_error(name: str) -> None:
    with pytest.raises(SettingsError, match=r"backbone\.id = .* does not exist"):
        _load(name)


def test_a_file_is_not_a_backbone(folder: Path) -> None:
    with pytest.raises(SettingsError, match="is a file"):
        _load(folder / "model.safetensors")


def test_an_id_that_the_hub_does_not_give_is_one_sentence_with_a_suggestion() -> None:
    with pytest.raises(BackboneError, match="could not be loaded from Hugging Face") as caught:
        _load("no-such-owner/no-such-model")
    assert "smollm2-135m" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(BackboneError, match=r"did you mean 'smollm2-135m'\.$"):
        _load("smollm2-135")


def test_a_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(BackboneError, match=r"a-model has no config\.json"):
        _load(folder)


def test_pickled_weights_are_never_read(folder: Path) -> None:
    torch.save(_load(folder).model.state_dict(), folder / "pytorch_model.bin")  # noqa: TID251
    (folder / "model.safetensors").unlink()
    with pytest.raises(BackboneError, match="a-model could not be loaded"):
        _load(folder)


def test_damaged_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BackboneError, match="a-model could not be loaded"):
        _load(folder)


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(BackboneError, match="a-model"):
        _load(folder)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    _edit(folder, num_hidden_layers=3)
    with pytest.raises(BackboneError, match=r"lacks \d+ weights .*layers\.2"):
        _load(folder)


def test_a_classifier_is_no_causal_language_model(folder: Path, tiny: Any) -> None:
    LlamaForSequenceClassification(tiny("llama").config).save_pretrained(folder)
    with pytest.raises(BackboneError, match="LlamaForSequenceClassification"):
        _load(folder)


def test_an_encoder_decoder_is_no_causal_language_model(folder: Path) -> None:
    T5Config(vocab_size=64, d_model=32, num_layers=1).save_pretrained(folder)
    with pytest.raises(BackboneError, match="no causal language model"):
        _load(folder)


def test_b10_a_quantised_copy_is_refused_and_the_full_precision_model_asked_for(folder: Path) -> None:
    _edit(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(BackboneError, match="is a quantised copy; name the full-precision model behind it"):
        _load(folder)


def test_the_identity_tells_trainings_apart_and_not_writings(folder: Path, tmp_path: Path, tiny: Any) -> None:
    first = folder_sha256(folder)
    other = tmp_path / "other"
    tiny("llama", seed=1).save_pretrained(other)
    assert folder_sha256(other) != first
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    _edit(copy, transformers_version="0.0.0", dtype="bfloat16")
    assert folder_sha256(copy) == first
    _edit(copy, rope_parameters={"rope_theta": 7.0, "rope_type": "default"})
    assert folder_sha256(copy) != first


def _perplexity(backbone: Any, text: str) -> float:
    ids = backbone.tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        return float(backbone.model(ids, labels=ids).loss.exp())


@pytest.mark.real
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_model_speaks(dtype: str) -> None:
    backbone = load_backbone(BackboneSettings(device="cpu", dtype=dtype))
    assert backbone.identity["sha256"].startswith("b179c9523d0e")
    assert (backbone.identity["layers"], backbone.identity["vocab"]) == (30, 49152)
    assert backbone.tokenizer.model_max_length == 8192
    prompt = backbone.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        following = backbone.model(prompt).logits[0, -1].argmax()
    assert backbone.tokenizer.decode(following) == " Paris"
    paragraph = (
        "The river rises in the hills to the north of the town and flows slowly through meadows before it "
        "reaches the sea. In winter the water is high and covers the lower fields, and the farmers move "
        "their cattle to the slopes. In summer the children swim under the old stone bridge, and on market "
        "days the road beside the water is full of carts."
    )
    words = paragraph.split()
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(0)).tolist()
    plain, shuffled = (
        _perplexity(backbone, paragraph),
        _perplexity(backbone, " ".join(words[i] for i in order)),
    )
    assert 5 < plain < 40
    assert shuffled > 20 * plain
