"""A folder with a language model of random weights that writes letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.models.pretrained.families import decoder_from_config
from jaxlab.models.pretrained.loading import save_pretrained
from tests.data.tiny_tokenizers import added, definition

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 97,
    "max_position_embeddings": 512,
}
END = 96


def write_tiny_model(folder: Path, *, context: int = 512) -> Path:
    """Printable ASCII and a new line, one token each; answers are letters or end soon."""
    config = {**CONFIG, "max_position_embeddings": context}
    model = decoder_from_config(config)
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))
    rng = np.random.default_rng(0)
    params: Any = jax.tree.map(
        lambda leaf: rng.normal(0, 0.6, leaf.shape).astype(np.float32), shapes["params"]
    )
    letters = [chr(code) for code in range(0x21, 0x7F)]
    tokens = ["Ġ", *letters, "Ċ"]
    step = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    tokenizer = definition(
        {"type": "BPE", "vocab": {token: n for n, token in enumerate(tokens)}, "merges": []},
        added_tokens=[added(END, "</s>")],
        pre_tokenizer={**step, "trim_offsets": True},
        decoder={**step, "trim_offsets": True},
    )
    described = '{"eos_token": "</s>"}'
    save_pretrained(
        folder,
        params,
        model,
        config,
        tokenizer={"tokenizer.json": tokenizer, "tokenizer_config.json": described},
    )
    return folder
