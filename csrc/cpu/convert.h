// One element to float and back, round to nearest even.
#pragma once

#include "types.h"

namespace specattn {

inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bits_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest >= 0x0400u) return bits_float(sign | ((rest << 13) + 0x38000000u));
  const float magnitude = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24
  return bits_float(sign | float_bits(magnitude));
}

inline float to_float(int8_t x) { return x; }

inline float to_float(e5m2 x) { return to_float(fp16{static_cast<uint16_t>(x.bits << 8)}); }

inline float to_float(e4m3_number x) {
  const int magnitude = x.bits & 0x7f;
  const uint16_t half = static_cast<uint16_t>((x.bits & 0x80) << 8 | magnitude << 7);
  return 256.0f * to_float(fp16{half});
}

inline float to_float(e4m3 x) {
  return (x.bits & 0x7fu) == 0x7fu ? bits_float(0x7fc00000u) : to_float(e4m3_number{x.bits});
}

template <class Elem>
inline Elem from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline bf16 from_float<bf16>(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

template <>
inline fp16 from_float<fp16>(float x) {
  const uint32_t u = float_bits(x), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
  if (rest > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (rest >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds beyond 65504
  if (rest < 0x38800000u) {  // below 2^-14: let the float adder round at 2^-24
    const float shifted = bits_float(rest) + 0.5f;
    return {static_cast<uint16_t>(sign | (float_bits(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = rest + 0xfffu + ((rest >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

// Whether some rows of e4m3 hold a NaN, all bits of its magnitude: rarely.
inline bool words_hold_nan(const char* const* rows, int count, int D) {
  uint64_t found[4] = {};
  const auto look = [&](const char* at, int words) {
    for (int i = 0; i < words; ++i) {
      uint64_t x;
      std::memcpy(&x, at + 8 * i, sizeof x);
      found[i] |= (x & 0x7f7f7f7f7f7f7f7f) + 0x0101010101010101;
    }
  };
  for (int n = 0; n < count; ++n) {
    int d = 0;
    for (; d + 32 <= D; d += 32) look(rows[n] + d, 4);
    if (d < D) look(rows[n] + d, (D - d) / 8);
  }
  return ((found[0] | found[1] | found[2] | found[3]) & 0x8080808080808080) != 0;
}

// The largest number of an 8-bit type: what is larger becomes it.
template <class Elem>
inline constexpr float kMost = 127.0f;
template <>
inline constexpr float kMost<e4m3> = 448.0f;
template <>
inline constexpr float kMost<e5m2> = 57344.0f;

// int8 has no NaN: 0 stands for it.
template <>
inline int8_t from_float<int8_t>(float x) {
  x = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x;
  return static_cast<int8_t>(x != x ? 0.0f : (x + 12582912.0f) - 12582912.0f);
}

// A float of 8 bits with so many of them in its mantissa.
template <class Elem, int kMantissa>
inline Elem to_float8(float x) {
  constexpr uint32_t kBias = (1u << (6 - kMantissa)) - 1, kDropped = 23 - kMantissa;
  constexpr uint32_t kLeastNormal = (128 - kBias) << 23;
  // A float whose last bit is worth the least of these numbers: adding it rounds as they do.
  constexpr uint32_t kRounding = (128 - kBias - kMantissa + 23) << 23;
  const uint32_t u = float_bits(x), sign = (u >> 24) & 0x80u;
  uint32_t rest = u & 0x7fffffffu;
  if (rest > 0x7f800000u) return {static_cast<uint8_t>(sign | 0x7fu)};
  rest = rest < float_bits(kMost<Elem>) ? rest : float_bits(kMost<Elem>);
  if (rest < kLeastNormal) {
    const float shifted = bits_float(rest) + bits_float(kRounding);
    return {static_cast<uint8_t>(sign | (float_bits(shifted) - kRounding))};
  }
  const uint32_t half = (1u << (kDropped - 1)) - 1;
  const uint32_t rounded = rest + half + ((rest >> kDropped) & 1u);
  return {static_cast<uint8_t>(sign | ((rounded - ((127 - kBias) << 23)) >> kDropped))};
}

template <>
inline e4m3 from_float<e4m3>(float x) {
  return to_float8<e4m3, 3>(x);
}

template <>
inline e5m2 from_float<e5m2>(float x) {
  return to_float8<e5m2, 2>(x);
}

}  // namespace specattn
