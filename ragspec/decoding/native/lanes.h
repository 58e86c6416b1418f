// Sixteen lanes at a time. GCC and Clang lower these vector types to whatever the machine has; only the two dot products,
// which nothing but an instruction makes fast, name theirs.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ragspec {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

constexpr int LANES = 16;

template <typename V>
inline V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <typename V>
inline void store(void* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

inline f32x16 splat(float value) { return f32x16{} + value; }

// a * b + c, rounded once where the machine can. Written out, and compiled without contraction: left to the compiler, two
// instances of one template might round differently, and a row's result would depend on the height of its tile.
inline f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

inline f32x16 larger(f32x16 a, f32x16 b) { return a > b ? a : b; }

inline f32x16 magnitude(f32x16 a) { return (f32x16)((i32x16)a & 0x7fffffff); }

// Reductions go pairwise in one fixed order, so that a row's result is a function of the row.
inline float sum(f32x16 a) {
  float lane[LANES];
  store(lane, a);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lane[i] += lane[i + width];
  return lane[0];
}

inline float largest(f32x16 a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)a);
#else
  float lane[LANES];
  store(lane, a);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
  return lane[0];
#endif
}

// e^x within 2 units in the last place for x in [-87, 88]; 0 below, and above what it is at 88. Of NaN, NaN.
inline f32x16 exponential(f32x16 x) {
  x = x > 88.0f ? splat(88.0f) : x;
  const f32x16 rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const f32x16 shifted = multiply_add(x, splat(1.44269504f), rounder);
  const f32x16 whole = shifted - rounder;
  f32x16 rest = multiply_add(whole, splat(-0.693359375f), x);  // ln 2 in two parts (Cody and Waite)
  rest = multiply_add(whole, splat(2.12194440e-4f), rest);
  f32x16 power = splat(1.9875691500e-4f);  // minimax polynomial of Cephes' expf
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    power = multiply_add(power, rest, splat(factor));
  power = multiply_add(power * rest, rest, rest + 1.0f);
  i32x16 exponent = ((i32x16)shifted - (i32x16)rounder) << 23;
  f32x16 result = (f32x16)((i32x16)power + exponent);
  return x < -87.0f ? splat(0.0f) : (x == x ? result : x);
}

// Float to bfloat16 bits, to nearest even.
inline u32x16 bfloat16_bits(f32x16 x) {
  u32x16 bits = (u32x16)x;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

inline u16x16 narrow(f32x16 x) { return __builtin_convertvector(bfloat16_bits(x), u16x16); }

inline uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Asks for the cache line at `address`, which need not be ours.
inline void prefetch(const void* address) { __builtin_prefetch(address); }

// Four unsigned bytes `four` against 16 quadruples of signed bytes, added to 16 sums. Exact.
inline i32x16 dot4(i32x16 sums, int32_t four, const int8_t* weights) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(four), _mm512_loadu_si512(weights));
#else
  uint8_t bytes[4];
  std::memcpy(bytes, &four, 4);
  for (int lane = 0; lane < LANES; lane++)
    for (int k = 0; k < 4; k++) sums[lane] += (int32_t)bytes[k] * weights[4 * lane + k];
  return sums;
#endif
}

// Two bfloat16 `two` against 16 pairs, added to 16 sums.
inline f32x16 dot2(f32x16 sums, uint32_t two, const uint16_t* pairs) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32((int32_t)two),
                                  (__m512bh)_mm512_loadu_si512(pairs));
#else
  u32x16 both = load<u32x16>(pairs);
  u32x16 lower = u32x16{} + (two << 16), upper = u32x16{} + (two & 0xffff0000u);
  sums = multiply_add((f32x16)lower, (f32x16)(both << 16), sums);
  return multiply_add((f32x16)upper, (f32x16)(both & 0xffff0000u), sums);
#endif
}

}  // namespace ragspec
