// Rotating a row before it is quantised spreads its few huge numbers over many, so that one scale a row suffices (QuaRot,
// arXiv 2404.00456). The weights are rotated the same way when they are packed: the product stays what it was.
#pragma once

#include "lanes.h"
#include "step.h"

namespace ragspec {

// Each lane with the one whose number differs in bit `bit`.
inline f32x16 swapped(f32x16 x, int bit) {
#if defined(__AVX512F__)
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (f32x16)_mm512_permutexvar_ps((__m512i)(lane ^ bit), (__m512)x);
#else
  f32x16 y;
  for (int lane = 0; lane < LANES; lane++) y[lane] = x[lane ^ bit];
  return y;
#endif
}

// Walsh-Hadamard transform of `span` numbers, a power of two from 16 up, not normalised.
inline void hadamard(float* x, int span) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto sign = [&](int bit) { return (lane & bit) != 0 ? splat(-1.0f) : splat(1.0f); };
  const f32x16 signs[] = {sign(1), sign(2), sign(4), sign(8)};
  for (int i = 0; i < span; i += LANES) {
    f32x16 value = load<f32x16>(x + i);
    for (int stage = 0; stage < 4; stage++) value = multiply_add(value, signs[stage], swapped(value, 1 << stage));
    store(x + i, value);
  }
  for (int step = LANES; step < span; step *= 2)
    for (int i = 0; i < span; i += 2 * step)
      for (int j = i; j < i + step; j += LANES) {
        const f32x16 low = load<f32x16>(x + j), high = load<f32x16>(x + j + step);
        store(x + j, low + high);
        store(x + j + step, low - high);
      }
}

inline void rotate(const Rotation& rotation, float* x) {
  const int count = rotation.count, span = rotation.span;
  for (int part = 0; part < count; part++) hadamard(x + part * span, span);
  f32x16 mixed[MOST_PARTS];
  for (int i = 0; i < span; i += LANES) {
    for (int to = 0; to < count; to++) {
      f32x16 value = {};
      for (int from = 0; from < count; from++)
        value = multiply_add(load<f32x16>(x + from * span + i), splat(rotation.mix[to * count + from]), value);
      mixed[to] = value;
    }
    for (int to = 0; to < count; to++) store(x + to * span + i, mixed[to]);
  }
}

}  // namespace ragspec
