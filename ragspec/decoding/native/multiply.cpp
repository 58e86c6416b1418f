// 8-bit matrix product by exact integer arithmetic. Activations are unsigned bytes around 128 with one scale a row, weights
// signed bytes with one scale an output. Integer sums have no order, so a row's result is the same bit for bit whatever rows
// stand beside it.
#include "crew.h"
#include "lanes.h"
#include "step.h"

namespace ragspec {

constexpr int BLOCK = 16;              // outputs in a vector of sums
constexpr int PANEL = 4;               // blocks that lie side by side in the packed weights
constexpr int STRIDE = PANEL * BLOCK * 4;  // bytes between a block's quadruples of inputs

// How far ahead weights are asked for, in bytes. They come from memory once a step, and the processor's own prefetching stops at
// every page: a step of few rows would wait for each.
constexpr int AHEAD = 8192;

// ROWS x BLOCKS vectors of sums, all in registers: 24 sums, 4 weights and a broadcast fill AVX-512's 32.
// FRESH: the weights come from memory, not from the core's cache.
template <int ROWS, int BLOCKS, bool FRESH>
static void tile(const Linear& weight, const uint8_t* x, const float* x_scale, const int8_t* packed, int output, float* out,
                 bool add) {
  const int inputs = weight.inputs;
  i32x16 sums[ROWS][BLOCKS] = {};
  for (int k = 0; k < inputs; k += 4, packed += STRIDE) {
    if (FRESH)
      for (int block = 0; block < BLOCKS; block++) prefetch(packed + AHEAD + block * BLOCK * 4);
    for (int row = 0; row < ROWS; row++) {
      int32_t four;
      std::memcpy(&four, x + (size_t)row * inputs + k, 4);
      for (int block = 0; block < BLOCKS; block++)
        sums[row][block] = dot4(sums[row][block], four, packed + block * BLOCK * 4);
    }
  }
  for (int block = 0; block < BLOCKS; block++) {
    const int first = output + block * BLOCK;
    const f32x16 scale = load<f32x16>(weight.scale + first);
    const i32x16 zero = load<i32x16>(weight.zero + first);
    for (int row = 0; row < ROWS; row++) {
      float* to = out + (size_t)row * weight.outputs + first;
      f32x16 value = __builtin_convertvector(sums[row][block] - zero, f32x16) * (scale * x_scale[row]);
      if (weight.bias) value += load<f32x16>(weight.bias + first);
      if (add) value += load<f32x16>(to);
      store(to, value);
    }
  }
}

template <int BLOCKS, bool FRESH>
static void tile_of(int height, const Linear& weight, const uint8_t* x, const float* x_scale, const int8_t* packed, int output,
                    float* out, bool add) {
  switch (height) {
    case 1: tile<1, BLOCKS, FRESH>(weight, x, x_scale, packed, output, out, add); break;
    case 2: tile<2, BLOCKS, FRESH>(weight, x, x_scale, packed, output, out, add); break;
    case 3: tile<3, BLOCKS, FRESH>(weight, x, x_scale, packed, output, out, add); break;
    case 4: tile<4, BLOCKS, FRESH>(weight, x, x_scale, packed, output, out, add); break;
    case 5: tile<5, BLOCKS, FRESH>(weight, x, x_scale, packed, output, out, add); break;
    default: tile<6, BLOCKS, FRESH>(weight, x, x_scale, packed, output, out, add); break;
  }
}

template <int BLOCKS>
static void tiles(const Linear& weight, const uint8_t* x, const float* x_scale, int rows, const int8_t* packed, int output,
                  float* out, bool add) {
  const int count = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (int i = 0; i < count; i++) {  // near equal heights: 7 rows are 4 and 3, not 6 and 1
    const int first = (int)((int64_t)rows * i / count), height = (int)((int64_t)rows * (i + 1) / count) - first;
    const uint8_t* from = x + (size_t)first * weight.inputs;
    float* to = out + (size_t)first * weight.outputs;
    if (i) tile_of<BLOCKS, false>(height, weight, from, x_scale + first, packed, output, to, add);
    else tile_of<BLOCKS, true>(height, weight, from, x_scale + first, packed, output, to, add);
  }
}

// Rows of a unit: 16 tiles, whose activations stay in the core's cache while a panel's weights pass.
constexpr int UNIT_ROWS = 16 * TILE_ROWS;
// From so many rows on threads share out rows, not outputs: a thread then reads what it wrote itself in the product before.
// With fewer, waiting for the weights is what takes time, and each is read once.
constexpr int SHARED_ROWS = 8 * TILE_ROWS;

void multiply(const Linear& weight, const uint8_t* x, const float* x_scale, int rows, float* out, bool add, int threads) {
  const int blocks = weight.outputs / BLOCK;
  int chunks = (rows + UNIT_ROWS - 1) / UNIT_ROWS;
  if (rows >= SHARED_ROWS) chunks = (chunks + threads - 1) / threads * threads;
  const int width = chunks > 1 || blocks >= 8 * PANEL * threads ? PANEL : PANEL / 2;
  const int columns = (blocks + width - 1) / width;
  share_out(threads, columns * chunks, [&](int unit) {
    const int block = unit % columns * width, chunk = unit / columns;
    const int first = (int)((int64_t)rows * chunk / chunks), height = (int)((int64_t)rows * (chunk + 1) / chunks) - first;
    const int8_t* packed = weight.packed + (size_t)(block / PANEL) * weight.inputs / 4 * STRIDE + block % PANEL * BLOCK * 4;
    const uint8_t* from = x + (size_t)first * weight.inputs;
    float* to = out + (size_t)first * weight.outputs;
    switch (blocks - block < width ? blocks - block : width) {
      case 1: tiles<1>(weight, from, x_scale + first, height, packed, block * BLOCK, to, add); break;
      case 2: tiles<2>(weight, from, x_scale + first, height, packed, block * BLOCK, to, add); break;
      case 3: tiles<3>(weight, from, x_scale + first, height, packed, block * BLOCK, to, add); break;
      default: tiles<4>(weight, from, x_scale + first, height, packed, block * BLOCK, to, add); break;
    }
  });
}

}  // namespace ragspec
