"""Published EAGLE-3 heads, as vLLM and SGLang load them: `config.json` and `model.safetensors`.

The layout is that of SafeAILab's checkpoints (github.com/SafeAILab/EAGLE, `eagle/model/cnets.py`): `fc`, one decoder layer
`midlayer` whose queries, keys and values read twice its width, `norm`, `lm_head` over a draft vocabulary, and `d2t`, by how
much each token of that vocabulary lies above its place in it. This file imports no torch, as `card.py` does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ragspec.heads.shape import ATTENTION, AttentionShape

CONFIG, FILE = "config.json", "model.safetensors"
#: How checkpoints name the one architecture; SafeAILab's own say `LlamaForCausalLM`.
_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
#: Places ahead in the training of EAGLE-3 (`length` in `eagle/traineagle3/cnets.py`).
_TRAINED_DEPTH = 7
#: What a configuration may say, or else leave out: everything else is a variant that we do not compute.
_ONLY: dict[str, Sequence[object]] = {
    "num_hidden_layers": (1,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "bias": (False,),
    "norm_before_residual": (False,),
    "norm_before_fc": (False,),
    "use_sliding_window": (False,),
    "parallel_drafting": (False,),
    "logit_scale": (1, 1.0),
    "partial_rotary_factor": (1, 1.0),
    "quantization_config": (),
}
#: The published weights of each of ours, joined by rows.
WEIGHTS: dict[str, tuple[str, ...]] = {
    "fuse.weight": ("fc.weight",),
    "token_norm.gain": ("midlayer.input_layernorm.weight",),
    "state_norm.gain": ("midlayer.hidden_norm.weight",),
    "inner_norm.gain": ("midlayer.post_attention_layernorm.weight",),
    "output_norm.gain": ("norm.weight",),
    "qkv.weight": tuple(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv"),
    "out.weight": ("midlayer.self_attn.o_proj.weight",),
    "gate_up.weight": ("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"),
    "down.weight": ("midlayer.mlp.down_proj.weight",),
}
EMBEDDINGS, OUTPUT, OFFSETS, _MASK = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"


def read_card(folder: Path) -> dict[str, Any]:
    """What a published head is, by its configuration and by the shapes of its weights, in the words of `HeadCard`.

    Raises:
        OSError, SafetensorError: a file cannot be read.
        ValueError, TypeError: it is no EAGLE-3 head, or a variant that we do not compute; the message says by what.
    """
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    _check_config(config)
    shapes = _shapes(folder)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    hidden = config.get("target_hidden_size") or width
    attention: dict[str, Any] = {
        "heads": heads,
        "key_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or width // heads,
        "width": width,
        "layers": _layers(config),
        "rope": _rope(config),
        "own_embeddings": config["vocab_size"] if EMBEDDINGS in shapes else 0,
        "own_output": OUTPUT in shapes,
    }
    layer = AttentionShape(**attention)
    _check_weights(config, shapes, layer, hidden)
    return {
        "architecture": ATTENTION,
        "target": "",
        "vocabulary": config["vocab_size"],
        "hidden": hidden,
        "inner": config["intermediate_size"],
        "depth": _TRAINED_DEPTH,
        "epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "training": {"published": folder.name},
        "attention": attention,
    }


def _check_config(config: Any) -> None:
    if not isinstance(config, dict):
        msg = f"{CONFIG} is no JSON object"
        raise TypeError(msg)
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in _ARCHITECTURES:
        msg = f"{CONFIG} says architectures={names}; what can be read is {', '.join(_ARCHITECTURES)}"
        raise ValueError(msg)
    eagle = config.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        msg = f"{CONFIG} says eagle_config={eagle!r}"
        raise TypeError(msg)
    said = config | {name: value for name, value in _rope_as_said(config).items() if name in _ONLY}
    wrong = [
        f"{name}={said[name]!r}"
        for name, allowed in _ONLY.items()
        if said.get(name) is not None and said[name] not in allowed
    ]
    if config.get("sliding_window") and config.get("use_sliding_window") is not False:
        wrong.append(f"sliding_window={config['sliding_window']!r}")
    if eagle.get("use_aux_hidden_state") is False:
        wrong.append("use_aux_hidden_state=False")
    if wrong:
        msg = f"{CONFIG} says {', '.join(wrong)}, a variant that is not computed here"
        raise ValueError(msg)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if type(config.get(name)) is not int or config[name] < 1:
            msg = f"{CONFIG} says {name}={config.get(name)!r}"
            raise ValueError(msg)


def _layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The layers whose inputs are read.

    At the top of a configuration they are counted as vLLM counts them, by inputs; in `eagle_config` as SGLang does, by outputs,
    and the input of a layer is the output of the one before.
    """
    counted = config.get("eagle_aux_hidden_state_layer_ids")
    if counted:
        return tuple(counted)
    return tuple(
        layer + 1 for layer in (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ()
    )


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """In the words of transformers 5; older configurations have the base beside the scaling, and call its type `type`."""
    rope = _rope_as_said(config)
    kind = rope.pop("type", "default")
    return {"rope_type": kind, "rope_theta": config.get("rope_theta") or 10000.0, **rope}


def _rope_as_said(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights by their published names."""
    if not (folder / FILE).exists():
        others = sorted(path.name for path in folder.glob("*.bin")) + sorted(
            path.name for path in folder.glob("*.index.json")
        )
        msg = f"it has no {FILE}" + (f" but {', '.join(others)}: convert it to one safetensors file" if others else "")
        raise ValueError(msg)
    with safe_open(folder / FILE, framework="np") as file:
        names = file.keys()  # the file is no mapping
        return {plain_name(name): tuple(file.get_slice(name).get_shape()) for name in names}


def plain_name(name: str) -> str:
    """A weight's name as SafeAILab has it: vLLM also takes the layer by its number, SGLang everything inside a `model`."""
    inside = name.removeprefix("model.")
    return inside.replace("layers.0.", "midlayer.", 1) if inside.startswith("layers.0.") else inside


def _check_weights(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], layer: AttentionShape, hidden: int
) -> None:
    vocabulary, inner = config["vocab_size"], config["intermediate_size"]
    drafts = config.get("draft_vocab_size") or shapes.get(OFFSETS, (vocabulary,))[0]
    width, queries, keys = layer.width, layer.heads * layer.head_dim, layer.key_heads * layer.head_dim
    norms = {name: (width,) for names in WEIGHTS.values() for name in names if name.endswith("norm.weight")}
    expected: dict[str, tuple[int, ...]] = norms | {
        "fc.weight": (width, layer.layer_count * hidden),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * width),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, queries),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
    }
    optional = {
        EMBEDDINGS: (vocabulary, width),
        OUTPUT: (drafts, width),
        OFFSETS: (drafts,),
        _MASK: (vocabulary,),
    }
    if missing := sorted(expected.keys() - shapes.keys()):
        msg = f"its weights lack {', '.join(missing)}"
        raise ValueError(msg)
    if strange := sorted(shapes.keys() - expected.keys() - optional.keys()):
        msg = f"its weights hold {', '.join(strange)}, which no EAGLE-3 head of the plain kind has"
        raise ValueError(msg)
    for name, shape in shapes.items():
        right = (expected | optional)[name]
        if shape != right:
            msg = f"its {name} has the shape {list(shape)}, by {CONFIG} it should be {list(right)}"
            raise ValueError(msg)
    if config.get("tie_word_embeddings") and EMBEDDINGS in shapes and OUTPUT not in shapes:
        msg = f"{CONFIG} says tie_word_embeddings=True, and output rows are not taken from a head's own embeddings here"
        raise ValueError(msg)
    if drafts != vocabulary and OFFSETS not in shapes:
        msg = f"its draft vocabulary has {drafts} of {vocabulary} tokens, and no {OFFSETS} says which"
        raise ValueError(msg)
