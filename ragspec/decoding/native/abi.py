"""The structures of step.h for ctypes: same names, same order."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_void_p, sizeof

#: Keys of a block of the cache, and queries of a tile.
KEY_BLOCK, TILE_ROWS = 64, 6
#: What the kernels have room for: dimensions of a head, parts that a rotation mixes, inputs of a matrix. A product of an
#: unsigned and a signed byte is below 2**15, so so many of them fit 32 bits.
MOST_HEAD_DIM, MOST_PARTS, MOST_INPUTS = 256, 64, 32768
#: The kinds of work that a step's time is told by.
PHASES = ("products", "attention", "rows", "output")


class Rotation(Structure):
    """An orthogonal transform of a row."""

    _fields_ = (("mix", c_void_p), ("count", c_int32), ("span", c_int32))


class Linear(Structure):
    """A weight matrix in 8 bits."""

    _fields_ = (
        ("packed", c_void_p),
        ("scale", c_void_p),
        ("zero", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("rotation", Rotation),
    )


class Layer(Structure):
    """A decoder layer."""

    _fields_ = (
        ("qkv", Linear),
        ("out", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("window", c_int32),
    )


class Model(Structure):
    """A decoder."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("head", Linear),
        ("layer_count", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("key_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate", c_int32),
        ("vocabulary", c_int32),
        ("epsilon", c_float),
        ("scaling", c_float),
    )


class Segment(Structure):
    """A run of new tokens of one sequence."""

    _fields_ = (("slot", c_int32), ("start", c_int32), ("length", c_int32), ("offset", c_int32))


class Tile(Structure):
    """Some rows of a segment's folded queries."""

    _fields_ = (("segment", c_int32), ("first", c_int32), ("rows", c_int32))


class Step(Structure):
    """One forward pass."""

    _fields_ = (
        ("segments", c_void_p),
        ("tiles", c_void_p),
        ("ids", c_void_p),
        ("slots", c_void_p),
        ("positions", c_void_p),
        ("wanted", c_void_p),
        ("tokens", c_int32),
        ("tile_count", c_int32),
        ("wanted_count", c_int32),
        ("slot_count", c_int32),
        ("capacity", c_int32),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("hidden", c_void_p),
        ("states", c_void_p),
        ("feature_layers", c_void_p),
        ("features", c_void_p),
        ("logits", c_void_p),
        ("choices", c_void_p),
        ("normalizers", c_void_p),
        ("bytes", c_void_p),
        ("scales", c_void_p),
        ("wide", c_void_p),
        ("queries", c_void_p),
        ("mixed", c_void_p),
        ("seconds", c_void_p),
        ("feature_count", c_int32),
        ("threads", c_int32),
    )


class Head(Structure):
    """A recurrent speculation head."""

    _fields_ = (
        ("gate_up", Linear),
        ("down", Linear),
        ("output", Linear),
        ("state_norm", c_void_p),
        ("token_norm", c_void_p),
        ("output_norm", c_void_p),
        ("embedding", c_void_p),
        ("tokens", c_void_p),
        ("hidden", c_int32),
        ("inner", c_int32),
        ("draft_vocabulary", c_int32),
        ("epsilon", c_float),
    )


class Extras(Structure):
    """Rows beside the draft vocabulary."""

    _fields_ = (
        ("rows", c_void_p),
        ("scale", c_void_p),
        ("zero", c_void_p),
        ("tokens", c_void_p),
        ("count", c_int32),
    )


class Chain(Structure):
    """Drafts of several sequences."""

    _fields_ = (
        ("states", c_void_p),
        ("ids", c_void_p),
        ("extras", c_void_p),
        ("drafted", c_void_p),
        ("probabilities", c_void_p),
        ("lengths", c_void_p),
        ("survival", c_void_p),
        ("bytes", c_void_p),
        ("scales", c_void_p),
        ("wide", c_void_p),
        ("logits", c_void_p),
        ("choices", c_void_p),
        ("normalizers", c_void_p),
        ("rows", c_int32),
        ("steps", c_int32),
        ("threads", c_int32),
        ("row_price", c_float),
        ("step_price", c_float),
    )


#: What `ragspec_layout` must give.
LAYOUT = (
    *(sizeof(structure) for structure in (Linear, Layer, Model, Segment, Tile, Step, Head, Extras, Chain)),
    KEY_BLOCK,
    TILE_ROWS,
    MOST_HEAD_DIM,
    MOST_PARTS,
    MOST_INPUTS,
    len(PHASES),
)
