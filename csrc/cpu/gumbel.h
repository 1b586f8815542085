// Gumbel noise by a counter-based generator, as reference/add_gumbel_noise.py writes it down. Plain
// loops that compilers turn into vectors, without fused steps: the same bits on every code path.
#pragma once

#include <algorithm>

#include "convert.h"
#include "kernels.h"

namespace specattn {

constexpr int kCounters = kNoiseGroup / 4;  // each of which makes four words

// A template only so that every code path compiles its own.
template <class Isa>
struct Gumbel {
  // ln of a positive normal number, to about one unit in the last place (Cephes' polynomial).
  static float ln(float x) {
    const auto bits = static_cast<int32_t>(float_bits(x));
    const int32_t exponent = (bits - 0x3f3504f3) >> 23;  // of x over the root of a half
    const float f = bits_float(static_cast<uint32_t>(bits - exponent * (1 << 23))) - 1.0f;
    const float n = static_cast<float>(exponent), z = f * f;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    const float tail = p * f * z + n * -2.12194440e-4f - 0.5f * z;
    return f + tail + n * 0.693359375f;
  }

  // -ln(-ln(u)) of the uniform number u = (upper 31 bits + 1/2) / 2^31.
  static float noise(uint32_t word) {
    const auto x = static_cast<int32_t>(word >> 1);
    const float unit = 1.0f / 2147483648.0f;
    const float u = (static_cast<float>(x) + 0.5f) * unit;
    const float rest = (static_cast<float>(0x7fffffff - x) + 0.5f) * unit;  // 1 - u, as exact as u
    // Above a half, u is 1 - rest and what that rounds off. Masks, as branches are no vectors.
    const auto above = static_cast<uint32_t>(-(x >> 30));
    const float near_one = 1.0f - rest;
    const float y = bits_float((float_bits(near_one) & above) | (float_bits(u) & ~above));
    const float rounded_off = bits_float(float_bits(((1.0f - y) - rest) / y) & above);
    return -ln(-(ln(y) + rounded_off));
  }

  // Philox4x32-10 of consecutive counters.
  static void words(const GumbelNoise& p, int64_t row, uint32_t first, uint32_t (*out)[kCounters]) {
    const auto position = static_cast<uint32_t>(p.positions[row]);
    const auto request = static_cast<uint32_t>(p.requests[row]);
    const auto key0 = static_cast<uint32_t>(p.seed), key1 = static_cast<uint32_t>(p.seed >> 32);
    for (uint32_t i = 0; i < kCounters; ++i) {
      uint32_t c0 = first + i, c1 = position, c2 = request, c3 = 0, k0 = key0, k1 = key1;
#pragma GCC unroll 10
      for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * c0, b = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, c1 = static_cast<uint32_t>(b);
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1, c3 = static_cast<uint32_t>(a);
        k0 += 0x9E3779B9, k1 += 0xBB67AE85;
      }
      out[0][i] = c0, out[1][i] = c1, out[2][i] = c2, out[3][i] = c3;
    }
  }
};

// Adds the noise of the tokens [first, first + kNoiseGroup) of a row.
template <class Isa, class Elem>
void add_gumbel_noise(const GumbelNoise& p, int64_t row, int64_t first) {
  uint32_t words[4][kCounters];
  Gumbel<Isa>::words(p, row, static_cast<uint32_t>(first / 4), words);
  const Elem* logits = static_cast<const Elem*>(p.logits) + row * p.logits_row;
  float* out = p.out + row * p.out_row;
  for (int w = 0; w < 4; ++w, first += kCounters) {
    const int64_t count = std::min<int64_t>(kCounters, p.vocabulary - first);
    for (int64_t i = 0; i < count; ++i) {
      out[first + i] = to_float(logits[first + i]) + Gumbel<Isa>::noise(words[w][i]);
    }
  }
}

}  // namespace specattn
