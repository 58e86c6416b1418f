// Attention of ragged segments over the packed cache: online softmax over blocks of 64 keys (FlashAttention, arXiv
// 2205.14135). Blocks lie at absolute positions and each row folds them in order, so a row's result depends on nothing but
// its query and its own keys: not on the width of the step, the chunk of the prompt or the sequences beside it.
#include <algorithm>
#include <cmath>

#include "crew.h"
#include "lanes.h"
#include "step.h"

namespace ragspec {

constexpr int BLOCK_VECTORS = KEY_BLOCK / LANES;

// sums[row][64] += rows[row][pairs] x packed[pairs][64]: both products of attention.
template <int ROWS>
static inline void accumulate(f32x16 (&sums)[ROWS][BLOCK_VECTORS], const uint16_t* const* rows, int pairs,
                              const uint16_t* packed, size_t stride) {
  for (int pair = 0; pair < pairs; pair++, packed += stride)
    for (int row = 0; row < ROWS; row++) {
      uint32_t two;
      std::memcpy(&two, rows[row] + 2 * pair, 4);
      for (int vector = 0; vector < BLOCK_VECTORS; vector++)
        sums[row][vector] = dot2(sums[row][vector], two, packed + vector * 2 * LANES);
    }
}

template <int ROWS>
static void attend_tile(const Model& model, const Layer& layer, const Step& step, const Tile& tile, int key_head,
                        const uint16_t* keys, const uint16_t* values) {
  const Segment& segment = step.segments[tile.segment];
  const int dim = model.head_dim, group = model.heads / model.key_heads;
  const uint16_t* query[ROWS];
  float* out[ROWS];
  int position[ROWS];
  for (int row = 0; row < ROWS; row++) {
    const int token = (tile.first + row) / group, head = key_head * group + (tile.first + row) % group;
    const size_t at = ((size_t)(segment.offset + token) * model.heads + head) * dim;
    query[row] = step.queries + at;
    out[row] = step.mixed + at;
    position[row] = segment.start + token;
  }
  alignas(64) float mixed[ROWS][MOST_HEAD_DIM] = {};
  alignas(64) uint16_t weight[ROWS][KEY_BLOCK];
  const uint16_t* weights[ROWS];
  float highest[ROWS];
  f32x16 total[ROWS] = {};
  for (int row = 0; row < ROWS; row++) {
    highest[row] = -INFINITY;
    weights[row] = weight[row];
  }
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int first = 0;
  if (layer.window && position[0] >= layer.window) first = (position[0] - layer.window + 1) / KEY_BLOCK * KEY_BLOCK;
  for (int block = first; block <= position[ROWS - 1]; block += KEY_BLOCK) {
    f32x16 scores[ROWS][BLOCK_VECTORS] = {};
    accumulate<ROWS>(scores, query, dim / 2, keys + (size_t)block * dim, 2 * KEY_BLOCK);
    for (int row = 0; row < ROWS; row++) {
      const bool whole = block + KEY_BLOCK - 1 <= position[row] && (!layer.window || block > position[row] - layer.window);
      f32x16 peak = splat(-INFINITY);
      for (int vector = 0; vector < BLOCK_VECTORS; vector++) {
        f32x16 score = scores[row][vector] * model.scaling;
        if (!whole) {
          const i32x16 key = lane + (block + vector * LANES);
          i32x16 visible = key <= position[row];
          if (layer.window) visible &= key > position[row] - layer.window;
          score = visible ? score : splat(-INFINITY);
        }
        scores[row][vector] = score;
        peak = larger(peak, score);
      }
      const float above = std::fmax(highest[row], largest(peak));
      if (above == -INFINITY) {  // nothing visible yet: a window that starts behind this block
        std::memset(weight[row], 0, sizeof weight[row]);
        continue;
      }
      if (above > highest[row]) {
        const f32x16 shrink = exponential(splat(highest[row] - above));
        total[row] *= shrink;
        for (int i = 0; i < dim; i += LANES) store(&mixed[row][i], load<f32x16>(&mixed[row][i]) * shrink);
        highest[row] = above;
      }
      for (int vector = 0; vector < BLOCK_VECTORS; vector++) {
        const u32x16 bits = bfloat16_bits(exponential(scores[row][vector] - above));
        total[row] += (f32x16)(bits << 16);  // what the values are weighted by, not what it was rounded from
        store(&weight[row][vector * LANES], __builtin_convertvector(bits, u16x16));
      }
    }
    const uint16_t* packed = values + (size_t)block * dim;
    for (int part = 0; part < dim; part += KEY_BLOCK) {  // 64 of the head's dimensions at a time
      f32x16 sums[ROWS][BLOCK_VECTORS];
      const int vectors = dim - part < KEY_BLOCK ? (dim - part) / LANES : BLOCK_VECTORS;
      for (int row = 0; row < ROWS; row++)
        for (int vector = 0; vector < BLOCK_VECTORS; vector++)
          sums[row][vector] = vector < vectors ? load<f32x16>(&mixed[row][part + vector * LANES]) : f32x16{};
      if (vectors == BLOCK_VECTORS) {
        accumulate<ROWS>(sums, weights, KEY_BLOCK / 2, packed + 2 * part, 2 * (size_t)dim);
      } else {
        for (int pair = 0; pair < KEY_BLOCK / 2; pair++)
          for (int row = 0; row < ROWS; row++) {
            uint32_t two;
            std::memcpy(&two, weights[row] + 2 * pair, 4);
            for (int vector = 0; vector < vectors; vector++)
              sums[row][vector] = dot2(sums[row][vector], two, packed + 2 * part + (size_t)pair * 2 * dim + vector * 2 * LANES);
          }
      }
      for (int row = 0; row < ROWS; row++)
        for (int vector = 0; vector < vectors; vector++) store(&mixed[row][part + vector * LANES], sums[row][vector]);
    }
  }
  for (int row = 0; row < ROWS; row++) {
    const float scale = 1.0f / sum(total[row]);
    for (int i = 0; i < dim; i += LANES) store(out[row] + i, load<f32x16>(&mixed[row][i]) * scale);
  }
}

void attend(const Model& model, const Layer& layer, const Step& step, const uint16_t* keys, const uint16_t* values,
            const uint8_t* is_wanted) {
  const size_t slot_size = (size_t)step.capacity * model.head_dim;
  const int units = step.tile_count * model.key_heads, group = model.heads / model.key_heads;
  const auto needed = [&](const Tile& tile) {
    const uint8_t* of = is_wanted + step.segments[tile.segment].offset;
    const uint8_t *first = of + tile.first / group, *end = of + (tile.first + tile.rows - 1) / group + 1;
    return std::find(first, end, 1) != end;
  };
  share_out(step.threads, units, [&](int unit) {
    // All tiles of a head of a sequence follow one another: its keys stay in the core's cache.
    const int key_head = unit % model.key_heads;
    const Tile& tile = step.tiles[unit / model.key_heads];
    if (is_wanted && !needed(tile)) return;
    const size_t at = ((size_t)step.segments[tile.segment].slot * model.key_heads + key_head) * slot_size;
    switch (tile.rows) {
      case 1: attend_tile<1>(model, layer, step, tile, key_head, keys + at, values + at); break;
      case 2: attend_tile<2>(model, layer, step, tile, key_head, keys + at, values + at); break;
      case 3: attend_tile<3>(model, layer, step, tile, key_head, keys + at, values + at); break;
      case 4: attend_tile<4>(model, layer, step, tile, key_head, keys + at, values + at); break;
      case 5: attend_tile<5>(model, layer, step, tile, key_head, keys + at, values + at); break;
      default: attend_tile<6>(model, layer, step, tile, key_head, keys + at, values + at); break;
    }
  });
}

}  // namespace ragspec
