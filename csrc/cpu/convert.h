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

}  // namespace specattn
