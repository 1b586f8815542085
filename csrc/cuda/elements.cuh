// Four elements of a tensor at a time, as float32. ELEMENT 2 is float32.
#pragma once

#include "ptx.cuh"

#if ELEMENT == 2
using Element = float;

DEVICE void load_four(float (&x)[4], const float* from) {
  float4 four = *reinterpret_cast<const float4*>(from);
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}
DEVICE void store_four(float* to, const float (&x)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}
#else
using Element = u16;

DEVICE float widened(u16 bits) { return ELEMENT == 0 ? from_bfloat16(bits) : from_float16(bits); }
DEVICE void load_four(float (&x)[4], const u16* from) {
  uint2 four = *reinterpret_cast<const uint2*>(from);
  x[0] = widened(four.x & 0xffff), x[1] = widened(four.x >> 16);
  x[2] = widened(four.y & 0xffff), x[3] = widened(four.y >> 16);
}
DEVICE void store_four(u16* to, const float (&x)[4]) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
}
#endif
