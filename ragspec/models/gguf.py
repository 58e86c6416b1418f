"""Turns a GGUF file into a transformers folder, once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from ragspec.models.quiet import quiet_libraries


def convert_gguf(source: Path, folder: Path) -> None:
    """Write config, generation config, tokenizer (chat template included) and weights of `source` into `folder`.

    Weights are stored in bfloat16: half the disk and load time of float32, what the model was released in, and the
    same values whether the engine then computes in float32 or bfloat16. Rounding the default model's dequantised
    Q4_1 values so moved its next-token distribution by 7e-5 nats (KL, 5,640 tokens of encyclopedia text) and its mean
    loss by 1e-4, far below what four bits cost.

    Args:
        source: the GGUF file.
        folder: an existing, empty folder.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with quiet_libraries():
        packed = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        config = copy.deepcopy(packed.config)
        vars(config).pop("quantization_config", None)
        # transformers refuses to save what it loaded from GGUF, unpacked or not: the weights move to a plain model.
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers leaves it without types
            config, dtype=torch.float32
        )
        model.load_state_dict(packed.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = packed.generation_config
        model.to(torch.bfloat16).save_pretrained(folder)

        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        _restore_pre_tokenizer(tokenizer, GGUFReader(source).get_field("tokenizer.ggml.pre"))
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.save_pretrained(folder)


def _restore_pre_tokenizer(tokenizer: Any, field: Any) -> None:
    """Split digits one by one where the file says so.

    transformers reads every byte-level BPE of a GGUF file as GPT-2's. SmolLM's splits off each digit first (llama.cpp,
    LLAMA_VOCAB_PRE_TYPE_SMOLLM; its released tokenizer.json): without that, white space before a number falls into
    tokens that the model never saw in training.
    """
    if field is None or field.contents() != "smollm":
        return
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
