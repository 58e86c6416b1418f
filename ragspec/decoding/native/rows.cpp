// What happens to each row by itself between two matrix products.
#include <cmath>

#include "crew.h"
#include "lanes.h"
#include "rotate.h"
#include "step.h"

namespace ragspec {

// Rows of a unit; fewer are done by one thread, as sharing them out costs more.
constexpr int UNIT_ROWS = 8;

template <typename Work>
static void for_rows(int threads, int rows, Work work) {
  share_out(threads, (rows + UNIT_ROWS - 1) / UNIT_ROWS, [&](int unit) {
    for (int row = unit * UNIT_ROWS; row < rows && row < (unit + 1) * UNIT_ROWS; row++) work(row);
  });
}

static float root_mean_square(const float* x, int width, float epsilon) {
  f32x16 squares = {};
  for (int i = 0; i < width; i += LANES) {
    const f32x16 value = load<f32x16>(x + i);
    squares += value * value;
  }
  return 1.0f / std::sqrt(sum(squares) / width + epsilon);
}

// Bytes around 128 of a row in float, and the scale that gives it back.
static float quantize_row(const float* row, int width, uint8_t* to) {
  f32x16 peak = {};
  i32x16 wrong = {};
  for (int i = 0; i < width; i += LANES) {
    const f32x16 value = load<f32x16>(row + i);
    peak = larger(peak, magnitude(value));
    wrong |= value != value;
  }
  const float top = largest(peak), inverse = top > 0 ? 127.0f / top : 0.0f;
  const f32x16 rounder = splat(12582912.0f + 128.0f);  // rounds to nearest even and adds 128
  for (int i = 0; i < width; i += LANES) {
    const i32x16 shifted = (i32x16)multiply_add(load<f32x16>(row + i), splat(inverse), rounder) & 0xff;
    store(to + i, __builtin_convertvector(shifted, u8x16));
  }
  // Bytes cannot say that a number was none; the scale can, and makes all that comes of the row NaN.
  int any = 0;
  for (int lane = 0; lane < LANES; lane++) any |= wrong[lane];
  return any ? NAN : top / 127.0f;
}

void embed(const Model& model, const Step& step) {
  for (int token = 0; token < step.tokens; token++) {
    const uint16_t* from = model.embedding + (size_t)step.ids[token] * model.hidden;
    float* to = step.hidden + (size_t)token * model.hidden;
    for (int i = 0; i < model.hidden; i += LANES)
      store(to + i, (f32x16)(__builtin_convertvector(load<u16x16>(from + i), u32x16) << 16));
  }
}

void normalize(const float* x, const float* weight, float epsilon, int rows, int width, float* out, int threads) {
  for_rows(threads, rows, [&](int row) {
    const float* from = x + (size_t)row * width;
    const float scale = root_mean_square(from, width, epsilon);
    for (int i = 0; i < width; i += LANES)
      store(out + (size_t)row * width + i, load<f32x16>(from + i) * scale * load<f32x16>(weight + i));
  });
}

// Quantises `rows` rows for a weight matrix; `fill(row, values)` writes a row in float.
template <typename Fill>
static void quantize_rows(const Linear& weight, int rows, uint8_t* out, float* scale, int threads, Fill fill) {
  for_rows(threads, rows, [&](int row) {
    alignas(64) float values[MOST_INPUTS];
    fill(row, values);
    rotate(weight.rotation, values);
    scale[row] = quantize_row(values, weight.inputs, out + (size_t)row * weight.inputs);
  });
}

void normalize_quantize(const Linear& weight, const float* x, const float* norm, float epsilon, int rows, uint8_t* out,
                        float* scale, int threads) {
  const int width = weight.inputs;
  quantize_rows(weight, rows, out, scale, threads, [&](int row, float* values) {
    const float* from = x + (size_t)row * width;
    const float factor = root_mean_square(from, width, epsilon);
    for (int i = 0; i < width; i += LANES) store(values + i, load<f32x16>(from + i) * factor * load<f32x16>(norm + i));
  });
}

void quantize(const Linear& weight, const float* x, int rows, uint8_t* out, float* scale, int threads) {
  quantize_rows(weight, rows, out, scale, threads, [&](int row, float* values) {
    std::memcpy(values, x + (size_t)row * weight.inputs, weight.inputs * sizeof(float));
  });
}

void normalize_pair_quantize(const Linear& weight, const Head& head, const Chain& chain) {
  const int width = head.hidden;
  quantize_rows(weight, chain.rows, chain.bytes, chain.scales, chain.threads, [&](int row, float* values) {
    const float* state = chain.states + (size_t)row * width;
    alignas(64) float token[MOST_INPUTS / 2];
    const uint16_t* from = head.embedding + (size_t)chain.ids[row] * width;
    for (int i = 0; i < width; i += LANES)
      store(token + i, (f32x16)(__builtin_convertvector(load<u16x16>(from + i), u32x16) << 16));
    const float left = root_mean_square(state, width, head.epsilon), right = root_mean_square(token, width, head.epsilon);
    for (int i = 0; i < width; i += LANES) {
      store(values + i, load<f32x16>(state + i) * left * load<f32x16>(head.state_norm + i));
      store(values + width + i, load<f32x16>(token + i) * right * load<f32x16>(head.token_norm + i));
    }
  });
}

void gate_quantize(const Linear& weight, const float* gate_up, int rows, uint8_t* out, float* scale, int threads) {
  const int width = weight.inputs;
  quantize_rows(weight, rows, out, scale, threads, [&](int row, float* values) {
    const float *gate = gate_up + (size_t)row * 2 * width, *up = gate + width;
    for (int i = 0; i < width; i += LANES) {
      const f32x16 value = load<f32x16>(gate + i);
      store(values + i, value / (exponential(-value) + 1.0f) * load<f32x16>(up + i));
    }
  });
}

// Of equal logits the first is the choice. The padding behind the vocabulary counts for nothing.
void summarize(const float* logits, int rows, int stride, int vocabulary, int32_t* choices, float* normalizers, int threads) {
  share_out(threads, rows, [&](int row) {
    const float* from = logits + (size_t)row * stride;
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const auto at = [&](int i) {
      const f32x16 value = load<f32x16>(from + i);
      return i + LANES <= vocabulary ? value : (lane < vocabulary - i ? value : splat(-INFINITY));
    };
    f32x16 peak = splat(-INFINITY);
    for (int i = 0; i < vocabulary; i += LANES) peak = larger(peak, at(i));
    const float top = largest(peak);
    f32x16 total = {};
    for (int i = 0; i < vocabulary; i += LANES) total += exponential(at(i) - top);
    choices[row] = 0;
    for (int i = 0; i < vocabulary; i++)
      if (from[i] == top) {
        choices[row] = i;
        break;
      }
    normalizers[row] = top + std::log(sum(total));
  });
}

// Norms, if the model has them, and turns a head's two halves (rotary embedding in the layout of transformers' Llama).
static void turn(const Model& model, const float* norm, const float* from, int position, float* to) {
  const int dim = model.head_dim, half = dim / 2;
  float scale = 1.0f;
  if (norm) scale = root_mean_square(from, dim, model.epsilon);
  const float *cosine = model.cosine + (size_t)position * half, *sine = model.sine + (size_t)position * half;
  for (int i = 0; i < half; i++) {
    float low = from[i], high = from[i + half];
    if (norm) {
      low = low * scale * norm[i];
      high = high * scale * norm[i + half];
    }
    to[i] = low * cosine[i] - high * sine[i];
    to[i + half] = high * cosine[i] + low * sine[i];
  }
}

void encode_positions(const Model& model, const Layer& layer, const Step& step, uint16_t* keys, uint16_t* values) {
  const int dim = model.head_dim;
  const size_t slot_size = (size_t)step.capacity * dim;
  for_rows(step.threads, step.tokens, [&](int token) {
    const float* row = step.wide + (size_t)token * layer.qkv.outputs;
    const int position = step.positions[token];
    alignas(64) float turned[MOST_HEAD_DIM];
    for (int head = 0; head < model.heads; head++, row += dim) {
      turn(model, layer.query_norm, row, position, turned);
      uint16_t* to = step.queries + ((size_t)token * model.heads + head) * dim;
      for (int i = 0; i < dim; i += LANES) store(to + i, narrow(load<f32x16>(turned + i)));
    }
    for (int head = 0; head < model.key_heads; head++, row += dim) {
      turn(model, layer.key_norm, row, position, turned);
      // [block of 64 keys][pair of dimensions][key][2]
      uint16_t* to = keys + ((size_t)step.slots[token] * model.key_heads + head) * slot_size +
                     (size_t)(position / KEY_BLOCK) * KEY_BLOCK * dim + position % KEY_BLOCK * 2;
      for (int i = 0; i < dim; i += 2, to += 2 * KEY_BLOCK) {
        to[0] = narrow(turned[i]);
        to[1] = narrow(turned[i + 1]);
      }
    }
    for (int head = 0; head < model.key_heads; head++, row += dim) {
      // [pair of keys][dimension][2]
      uint16_t* to = values + ((size_t)step.slots[token] * model.key_heads + head) * slot_size +
                     (size_t)(position / 2) * 2 * dim + position % 2;
      for (int i = 0; i < dim; i++) to[2 * i] = narrow(row[i]);
    }
  });
}

}  // namespace ragspec
