// The product of weights and values, a tile of keys at a time.
//
// A weight of 0 times NaN or infinity is NaN. Where rows differ in which keys they see, values are
// looked at first, and such ones are left out of the product and added to the rows that see them.
#pragma once

#include "collect.cuh"

// The weights of 16 keys as the left operand of a product.
DEVICE void weights_of(u32 (&weights)[4], const float (&x)[kKeys / 8][4], int j) {
#pragma unroll
  for (int e = 0; e < 4; e++)
    weights[e] = pack(x[2 * j + e / 2][e % 2 * 2], x[2 * j + e / 2][e % 2 * 2 + 1]);
}

// out += P V with the values of a stage.
DEVICE void add_values(float (&out)[kTiles][kColumns][4], u32 values, Logits& x) {
#pragma unroll
  for (int j = 0; j < kKeys / 16; j++) {
    u32 weights[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; i++) weights_of(weights[i], x[i], j);
#pragma unroll
    for (int c = 0; c < D / 16; c++) {
      u32 v[4];
      load_matrices_transposed(v, values + j * 16 * kPitch + c * 32);
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        multiply_add(out[i][2 * c], weights[i], v[0], v[1]);
        multiply_add(out[i][2 * c + 1], weights[i], v[2], v[3]);
      }
    }
  }
}

// Of two elements the sign bits, set where one is NaN or infinite.
DEVICE u32 odd_bits(u32 both) { return ((both & kExponents) + kLeastExponents) & 0x80008000u; }

// Whether some value of a tile is NaN or infinite, the same in all lanes of a warp.
DEVICE bool any_odd(u32 values) {
  u32 odd = 0;
#pragma unroll
  for (int j = 0; j < kKeys / 16; j++) {
#pragma unroll
    for (int c = 0; c < D / 16; c++) {
      u32 v[4];
      load_matrices_transposed(v, values + j * 16 * kPitch + c * 32);
#pragma unroll
      for (int e = 0; e < 4; e++) odd |= odd_bits(v[e]);
    }
  }
  return __any_sync(kWholeWarp, odd != 0);
}

// Which of the keys [n0, n0 + kKeys) of the tree or of the prefix a row sees.
DEVICE u32 seen_bits(const Params& p, const Work& w, const int* lower, bool in_tree, int r,
                     int n0) {
  return in_tree ? tree_bits_of_row(p, w, r, n0) : prefix_bits(p, w, lower, r, n0);
}

// As `add_values`; rows that see a value that is NaN or infinite become NaN in its column.
DEVICE void add_seen_values(const Params& p, const Work& w, const Lane& me, const int* lower,
                            bool in_tree, int n0, float (&out)[kTiles][kColumns][4], u32 values,
                            Logits& x) {
  u32 ones[kTiles][kKeys / 16][4];  // for weights, of the keys that are seen
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    u32 seen[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
      seen[half] = seen_bits(p, w, lower, in_tree, me.row(i, half), n0) >> (me.lane % 4 * 2);
#pragma unroll
    for (int j = 0; j < kKeys / 16; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        u32 two = seen[e % 2] >> (j * 16 + e / 2 * 8);
        ones[i][j][e] = (two & 1 ? kOnes & 0xffffu : 0) | (two & 2 ? kOnes & 0xffff0000u : 0);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < D / 16; c++) {
    float met[kTiles][2][4] = {};
#pragma unroll
    for (int j = 0; j < kKeys / 16; j++) {
      u32 v[4], odd[4];
      load_matrices_transposed(v, values + j * 16 * kPitch + c * 32);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        u32 whole = (odd_bits(v[e]) >> 15) * 0xffffu;
        odd[e] = kOnes & whole;
        v[e] &= ~whole;
      }
#pragma unroll
      for (int i = 0; i < kTiles; i++) {
        u32 weights[4];
        weights_of(weights, x[i], j);
        multiply_add(out[i][2 * c], weights, v[0], v[1]);
        multiply_add(out[i][2 * c + 1], weights, v[2], v[3]);
        multiply_add(met[i][0], ones[i][j], odd[0], odd[1]);
        multiply_add(met[i][1], ones[i][j], odd[2], odd[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; i++) {
#pragma unroll
      for (int e = 0; e < 8; e++) {
        if (met[i][e / 4][e % 4] > 0.0f) out[i][2 * c + e / 4][e % 4] = not_a_number();
      }
    }
  }
}
