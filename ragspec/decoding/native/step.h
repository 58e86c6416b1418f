// What a step is told, as `ragspec/decoding/native/abi.py` lays it out: keep the two in the same order.
#pragma once

#include <cstdint>

extern "C" {

// An orthogonal transform of a row: its `count` parts of `span` numbers are each turned by a Hadamard matrix, then mixed with
// one another by `mix`.
struct Rotation {
  const float* mix;  // [count, count], times 1 / sqrt(span)
  int32_t count, span;
};

// A weight matrix [outputs, inputs] in 8 bits, one scale a row, packed by `ragspec_pack`. It takes rotated inputs.
struct Linear {
  const int8_t* packed;    // [outputs / 64, rounded up][inputs / 4][64][4], padded with zeros
  const float* scale;      // [outputs]
  const int32_t* zero;     // [outputs]: 128 times the row's sum, what the activations' offset adds
  const float* bias;       // [outputs] or null
  int32_t inputs, outputs;  // multiples of 16
  Rotation rotation;
};

struct Layer {
  Linear qkv, out, gate_up, down;
  const float *attention_norm, *mlp_norm;  // [hidden]
  const float *query_norm, *key_norm;      // [head_dim] or null
  int32_t window;                          // keys a query sees, itself included; 0 for all
};

struct Model {
  const Layer* layers;
  const uint16_t* embedding;   // [vocabulary, hidden] in bfloat16
  const float* final_norm;
  const float *cosine, *sine;  // [positions, head_dim / 2]
  Linear head;
  int32_t layer_count, hidden, heads, key_heads, head_dim, intermediate, vocabulary;
  float epsilon, scaling;
};

struct Segment {
  int32_t slot, start, length, offset;  // `offset`: of its first token in the packed row
};

// Rows [first, first + rows) of one segment's folded queries (token-major, `heads / key_heads` rows a token).
struct Tile {
  int32_t segment, first, rows;
};

struct Step {
  const Segment* segments;
  const Tile* tiles;
  const int32_t *ids, *slots, *positions;  // [tokens]
  const int32_t* wanted;             // [wanted_count]: packed places whose logits are wanted
  int32_t tokens, tile_count, wanted_count;
  int32_t slot_count, capacity;      // of the cache
  uint16_t *keys, *values;           // cache: [layers, slots, key_heads, capacity * head_dim], packed
  float* hidden;                     // scratch [tokens, hidden]
  float* states;                     // [wanted_count, hidden]: final hidden states out
  const int32_t* feature_layers;     // [feature_count]: layers whose input is wanted of every token
  float* features;                   // [tokens, feature_count, hidden] out
  float* logits;                     // [wanted_count, head.outputs] out
  int32_t* choices;                  // [wanted_count]: the place of each row's highest logit out
  float* normalizers;                // [wanted_count]: log of the sum of each row's exponentials out
  uint8_t* bytes;                    // scratch [tokens, max(hidden, heads * head_dim, intermediate)]
  float* scales;                     // scratch [tokens]
  float* wide;                       // scratch [tokens, max(qkv.outputs, gate_up.outputs)]
  uint16_t* queries;                 // scratch [tokens, heads * head_dim]
  float* mixed;                      // scratch [tokens, heads * head_dim]
  double* seconds;                   // null, or [Phase::count]: what each kind of work took is added
  int32_t feature_count, threads;
};

// A recurrent speculation head: x = [norm(state), norm(embedding of the token)], state += down(silu(gate(x)) * up(x)), and the
// next token by norm(state). The target's own embeddings and output rows serve it.
struct Head {
  Linear gate_up;             // [2 * inner, 2 * hidden]
  Linear down;                // [hidden, inner]
  Linear output;              // [draft vocabulary, rounded up, hidden]: rows of the target's output matrix
  const float *state_norm, *token_norm, *output_norm;  // [hidden]
  const uint16_t* embedding;  // [vocabulary, hidden] in bfloat16
  const int32_t* tokens;      // [draft vocabulary]: the token of each row of `output`
  int32_t hidden, inner, draft_vocabulary;
  float epsilon;
};

// Rows of the target's output matrix beside the draft vocabulary, for one sequence; they take the same rotated inputs.
struct Extras {
  const int8_t* rows;     // [count, hidden]
  const float* scale;     // [count]
  const int32_t* zero;    // [count], as in Linear
  const int32_t* tokens;  // [count]
  int32_t count;
};

// Drafts for `rows` sequences, token by token. A draft ends before the token whose survival, the product of the head's own
// probabilities, falls under `row_price`; all end where what the survivors promise beyond that is less than `step_price`.
struct Chain {
  float* states;                 // [rows, hidden]: the target's hidden states in, scratch
  int32_t* ids;                  // [rows]: the last token in, scratch
  const Extras* extras;          // [rows]
  int32_t* drafted;              // [rows, steps] out
  float* probabilities;          // [rows, steps] out
  int32_t* lengths;              // [rows + 1] out: tokens of each draft, and at last the steps that were walked
  float* survival;               // scratch [rows]
  uint8_t* bytes;                // scratch [rows, max(2 * hidden, inner)]
  float* scales;                 // scratch [rows]
  float* wide;                   // scratch [rows, 2 * inner]
  float* logits;                 // scratch [rows, output.outputs]
  int32_t* choices;              // scratch [rows]
  float* normalizers;            // scratch [rows]
  int32_t rows, steps, threads;
  float row_price, step_price;
};

}

namespace ragspec {

// Kinds of work that a step's time is told by.
enum class Phase { products, attention, rows, output, count };

void multiply(const Linear& weight, const uint8_t* x, const float* x_scale, int rows, float* out, bool add, int threads);
// `is_wanted`: null, or which tokens' attention is needed, [tokens]; the others' is left out where a tile has none that is.
void attend(const Model& model, const Layer& layer, const Step& step, const uint16_t* keys, const uint16_t* values,
            const uint8_t* is_wanted);
void normalize(const float* x, const float* weight, float epsilon, int rows, int width, float* out, int threads);
void normalize_quantize(const Linear& weight, const float* x, const float* norm, float epsilon, int rows, uint8_t* out,
                        float* scale, int threads);
void quantize(const Linear& weight, const float* x, int rows, uint8_t* out, float* scale, int threads);
void embed(const Model& model, const Step& step);
void summarize(const float* logits, int rows, int stride, int vocabulary, int32_t* choices, float* normalizers, int threads);
void gate_quantize(const Linear& weight, const float* gate_up, int rows, uint8_t* out, float* scale, int threads);
void normalize_pair_quantize(const Linear& weight, const Head& head, const Chain& chain);
void encode_positions(const Model& model, const Layer& layer, const Step& step, uint16_t* keys, uint16_t* values);

// Tokens of a block of keys, and rows of a tile of queries.
constexpr int KEY_BLOCK = 64;
constexpr int TILE_ROWS = 6;

constexpr int MOST_HEAD_DIM = 256;

// Parts that a rotation mixes at most.
constexpr int MOST_PARTS = 64;

// Inputs of a weight matrix at most: a row is rotated on the stack.
constexpr int MOST_INPUTS = 32768;

}  // namespace ragspec
