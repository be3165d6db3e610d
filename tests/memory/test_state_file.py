"""A conversation saved and gone on with: bit-equal, private, and nothing that does not fit."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from fednl.errors import BackboneError, CheckpointError, FednlError, SettingsError
from fednl.memory import (
    MemoryCache,
    MemoryConfig,
    attach_memory,
    detach_memory,
    load_state,
    rules,
    save_rules,
    save_state,
)
from fednl.memory.sites import attachment
from fednl.memory.state_file import STATE_DESCRIPTION, rules_hash
from memory.models import tiny, tokens, with_memory

SETTINGS: list[dict[str, Any]] = [
    {},
    {"sink_tokens": 0, "layers": "last:1"},
    {"keys": "context", "write": "leaving", "rule": "gated-delta"},
    {"rule": "titans", "write": "leaving"},
    {"rule": "titans", "window_tokens": 0, "keys": "context"},
    {"rule": "gated-delta-product", "keys": "context", "write": "leaving"},
    {"rule": "ttt-linear", "write": "leaving", "mini_batch_tokens": 5, "conv_tokens": 3},
    {"rule": "ttt-linear", "window_tokens": 0, "conv_tokens": 4, "keys": "context"},
    {"layers": "none"},
]


def conversation(model: Any, length: int = 21) -> MemoryCache:
    """A cache of two rows after some tokens, the second row padded on the left and inside."""
    cache = MemoryCache(model)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :3] = mask[1, length // 2] = 0
    with torch.no_grad():
        model(tokens(2, length), attention_mask=mask, cache=cache)
    return cache


def held(cache: MemoryCache) -> dict[str, Tensor]:
    named = {f"{i}.{n}": t for i, layer in enumerate(cache.layers) for n, t in vars(layer.tensors).items()}
    named |= {"counts": cache.counts, "positions": cache.positions}
    return {name: t for name, t in named.items() if t is not None}


def go_on(model: Any, cache: MemoryCache) -> list[Tensor]:
    """Logits of pieces of every kind: several tokens, one token, a padded one."""
    with torch.no_grad():
        pieces = [model(piece, cache=cache).logits for piece in tokens(2, 14, seed=5).split([11, 1, 1, 1], 1)]
        mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
        return [*pieces, model(tokens(2, 4, seed=6), attention_mask=mask, cache=cache).logits]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())) or "default")
@pytest.mark.parametrize("length", [6, 21])
def test_going_on_after_loading_is_bit_equal(tmp_path: Path, settings: dict[str, Any], length: int) -> None:
    model = with_memory(**settings)
    cache = conversation(model, length)
    assert save_state(cache, tmp_path / "a" / "state") == tmp_path / "a" / "state"
    other = load_state(with_memory(**settings), tmp_path / "a" / "state")
    before, after = held(cache), held(other)
    assert before.keys() == after.keys()
    assert all(torch.equal(t, after[name]) and t.dtype == after[name].dtype for name, t in before.items())
    loaded = load_state(model, tmp_path / "a" / "state")
    assert (loaded.seen_tokens, loaded.has_padding) == (cache.seen_tokens, cache.has_padding)
    for one, two in zip(go_on(model, cache), go_on(model, loaded), strict=True):
        assert torch.equal(one, two)
    for name, tensor in held(cache).items():
        assert torch.equal(tensor, held(loaded)[name]), name


def test_a_narrow_backbone_keeps_its_dtype_and_another_is_refused(tmp_path: Path) -> None:
    model = with_memory().to(torch.bfloat16)
    cache = conversation(model)
    save_state(cache, tmp_path)
    for one, two in zip(go_on(model, cache), go_on(model, load_state(model, tmp_path)), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(CheckpointError, match="written in dtype bfloat16, and the backbone is float32 here"):
        load_state(with_memory(), tmp_path)


def test_an_empty_conversation_stays_empty(tmp_path: Path) -> None:
    model = with_memory()
    loaded = load_state(model, save_state(MemoryCache(model), tmp_path))
    assert not held(loaded) and loaded.seen_tokens == 0
    assert len(go_on(model, loaded)) == 5


def test_files_are_for_their_owner_only_and_the_old_state_goes(tmp_path: Path) -> None:
    model, folder = with_memory(), tmp_path / "state"
    save_state(conversation(model), folder)
    first = {path.name for path in folder.iterdir()}
    save_state(conversation(model, 30), folder)
    second = {path.name for path in folder.iterdir()}
    assert len(first) == len(second) == 2 and first & second == {STATE_DESCRIPTION}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_save_that_fails_leaves_the_earlier_state_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fednl.memory.state_file as file

    model = with_memory()
    save_state(conversation(model), tmp_path)
    write = file.write_atomic

    def fails(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name == STATE_DESCRIPTION:
            raise OSError("disk full")
        write(path, *args, **kwargs)

    monkeypatch.setattr(file, "write_atomic", fails)
    with pytest.raises(OSError, match="disk full"):
        save_state(conversation(model, 30), tmp_path)
    assert load_state(model, tmp_path).seen_tokens == 21


def test_a_state_is_kept_apart_from_rules_and_runs(tmp_path: Path) -> None:
    model = with_memory()
    cache = conversation(model)
    save_rules(model, tmp_path / "rules")
    run = tmp_path / "run"
    (run / "deep").mkdir(parents=True)
    for name in ("config.json", "environment.json"):
        (run / name).write_text("{}")
    for folder in (tmp_path / "rules", run, run / "deep" / "new"):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SettingsError, match="name a folder of its own"):
            save_state(cache, folder)
        assert sorted(tmp_path.rglob("*")) == before


def test_only_the_model_that_wrote_it_goes_on(tmp_path: Path) -> None:
    model = with_memory()
    save_state(conversation(model), tmp_path)
    with pytest.raises(BackboneError, match=r"written on backbone .*: family is 'qwen2' there and 'llama' here"):
        load_state(with_memory("llama"), tmp_path)
    with pytest.raises(BackboneError, match=r"written on backbone .*: fingerprint is"):
        load_state(with_memory(seed=3), tmp_path)
    with pytest.raises(BackboneError, match="no memory attached"):
        load_state(tiny(), tmp_path)
    for settings, named in (
        ({"window_tokens": 9}, "window-tokens = 8, and it is 9"),
        ({"sink_tokens": 3}, "sink-tokens = 2, and it is 3"),
        ({"rule": "hebbian"}, "rule = 'delta', and it is 'hebbian'"),
        ({"write": "leaving"}, "write = 'now', and it is 'leaving'"),
    ):
        with pytest.raises(CheckpointError, match=f"The memory state in .* needs memory.{named}"):
            load_state(with_memory(**settings), tmp_path)
    other = with_memory(chunk_tokens=7)
    assert load_state(other, tmp_path).seen_tokens == 21
    with torch.no_grad():
        rules(other)["layers.1.memory.gate.bias"][0] += 1e-6
    with pytest.raises(CheckpointError, match="written with other rules"):
        load_state(other, tmp_path)
    with pytest.raises(SettingsError, match="No memory state in"):
        load_state(model, tmp_path / "elsewhere")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_lora_is_part_of_what_wrote_it(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj"]))
    attach_memory(model, MemoryConfig(layers="all", keys="token", window_tokens=8, sink_tokens=2))
    save_state(conversation(model), tmp_path)
    assert load_state(model, tmp_path).seen_tokens == 21
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B" in n).add_(1)
    with pytest.raises(CheckpointError, match="written with other rules"):
        load_state(model, tmp_path)


def test_what_learned_numbers_do_is_part_of_what_wrote_it(tmp_path: Path) -> None:
    """A LoRA of another scale, or switched off, makes another model, and so do context vectors, or others."""
    from fednl.models.context_vectors import attach_context, context_params, detach_context
    from fednl.models.lora import attach_lora, lora_params
    from fednl.models.settings import ContextVectorSettings, LoraSettings

    def with_lora(alpha: float) -> Any:
        model = with_memory()
        attach_lora(model, LoraSettings(rank=2, targets="q_proj", alpha=alpha), seed=0)
        with torch.no_grad():
            for name, factor in lora_params(model).items():
                factor.fill_(0.1 if name.endswith("lora_B") else 0.2)
        return model

    model = with_lora(2.0)
    save_state(conversation(model), tmp_path / "lora")
    assert load_state(with_lora(2.0), tmp_path / "lora").seen_tokens == 21
    with pytest.raises(CheckpointError, match=r"written with other rules .*a LoRA's scale and context vectors count"):
        load_state(with_lora(8.0), tmp_path / "lora")
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.enable_adapters(False)
    with pytest.raises(CheckpointError, match="written with other rules"):
        load_state(model, tmp_path / "lora")

    model = with_memory()
    save_state(conversation(model), tmp_path / "plain")
    attach_context(model, ContextVectorSettings())
    save_state(conversation(model), tmp_path / "context")
    assert load_state(model, tmp_path / "context").seen_tokens == 21
    with pytest.raises(CheckpointError, match="written with other rules"):
        load_state(model, tmp_path / "plain")
    with torch.no_grad():
        context_params(model)["context.vectors"][1, 0, 0] += 1
    with pytest.raises(CheckpointError, match="written with other rules"):
        load_state(model, tmp_path / "context")
    detach_context(model)
    assert load_state(model, tmp_path / "plain").seen_tokens == 21
    attach_context(model, ContextVectorSettings(inject="answer"))
    with pytest.raises(CheckpointError, match="written with other rules"):
        load_state(model, tmp_path / "context")


def test_a_model_without_a_lora_has_the_hash_it_always_had() -> None:
    """States that were saved before go on."""
    model = with_memory()
    digest = hashlib.sha256()
    for name, rule in sorted(rules(model).items()):
        digest.update(f"{name} {rule.dtype} {list(rule.shape)}\n".encode() + rule.detach().numpy().tobytes())
    assert rules_hash(attachment(model)) == digest.hexdigest()


def test_a_cache_without_its_memory_is_not_saved(tmp_path: Path) -> None:
    model = with_memory()
    cache = conversation(model)
    detach_memory(model)
    with pytest.raises(BackboneError, match="no memory attached"):
        save_state(cache, tmp_path / "state")
    assert not (tmp_path / "state").exists()


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Replaces the tensors by changed ones, their hash put right, as nothing but a deliberate hand does."""
    (file,) = folder.glob("state-*.safetensors")
    tensors = load_file(file)
    change(tensors)
    content = save(tensors)
    digest = hashlib.sha256(content).hexdigest()
    file.unlink()
    (folder / f"state-{digest[:16]}.safetensors").write_bytes(content)
    description = json.loads((folder / STATE_DESCRIPTION).read_text())
    (folder / STATE_DESCRIPTION).write_text(json.dumps(description | {"tensors": digest}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("layers.1.state"), r"lacks 1 tensors, first 'layers\.1\.state'"),
        (lambda t: t.pop("counts"), "lacks counts"),
        (lambda t: t.update({"layers.9.state": torch.zeros(1)}), r"1 tensors that this model has not.*layers\.9"),
        (lambda t: t.update({"layers.1.momentum": torch.zeros(1)}), r"has not, first 'layers\.1\.momentum'"),
        (lambda t: t.update({"layers.1.state": torch.zeros(2, 2, 8, 7)}), r"has shape \[2, 2, 8, 7\], the model needs"),
        (lambda t: t.update({"positions": t["positions"][:, 1:].clone()}), r"'positions' has shape \[2, 7\]"),
        (lambda t: t.update({"counts": t["counts"][:1].clone()}), "has shape"),
        (lambda t: t.update({"layers.1.state": t["layers.1.state"].half()}), "is float16, the model needs float32"),
        (lambda t: t.update({"layers.1.keys": t["layers.1.keys"].int()}), "is int32, the model needs floating point"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], words: str
) -> None:
    model = with_memory()
    save_state(conversation(model), tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(CheckpointError, match=words):
        load_state(model, tmp_path)


def test_damaged_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    model = with_memory()
    save_state(conversation(model), tmp_path)
    path = tmp_path / STATE_DESCRIPTION
    (file,) = tmp_path.glob("state-*.safetensors")
    text, content = path.read_text(), file.read_bytes()
    description = json.loads(text)
    for key, value in (
        ("backbone", None),
        ("memory", [1]),
        ("rules", None),
        ("tensors", "../../x"),
        ("tensors", 3),
        ("seen_tokens", True),
        ("has_padding", 0),
        ("dtype", None),
    ):
        path.write_text(json.dumps(description | {key: value}))
        with pytest.raises(FednlError, match=r"^The memory s[^\n]*[.]$"):
            load_state(model, tmp_path)
    path.write_text(json.dumps(description | {"format": 2}))
    with pytest.raises(CheckpointError, match="has format 2; this version reads format 1"):
        load_state(model, tmp_path)
    for damaged in ("{", "[]"):
        path.write_text(damaged)
        with pytest.raises(CheckpointError, match=r"damaged \(state\.json\)"):
            load_state(model, tmp_path)
    path.write_text(text)
    for damage in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), b""):
        file.write_bytes(damage)
        with pytest.raises(CheckpointError, match="is not what was written"):
            load_state(model, tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load_state(model, tmp_path)
