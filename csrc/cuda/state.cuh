// The running softmax of some rows: output, sum and maximum; and how states are merged.
#pragma once

#include "ptx.cuh"

// -inf stands for "no key yet"; as a pivot it would make -inf - -inf.
DEVICE float pivot_of(float maximum) { return maximum == minus_infinity() ? 0.0f : maximum; }

// Logits are in base 2, relative to a pivot: a logit that was the greatest once. What is summed may
// be 2^kSlack times greater than 1, so the pivot need not follow every new maximum: float32 holds
// as many digits of the sum, and either type of element as many of a weight.
constexpr float kSlack = 8.0f;

// `sum` counts this lane's columns only, until the end.
struct RowState {
  float maximum, sum;

  DEVICE void begin() {
    maximum = minus_infinity();
    sum = 0.0f;
  }

  DEVICE bool exceeded_by(float logit) const { return logit > maximum + kSlack; }

  // Takes a new maximum if it must; returns by how much what was summed before shrinks.
  DEVICE float raise(float candidate) {
    float before = maximum;
    if (exceeded_by(candidate)) maximum = candidate;
    float shrink = exp2_approximate(before - pivot_of(maximum));
    if (maximum == before) shrink = 1.0f;
    sum *= shrink;
    return shrink;
  }
};

// Over the four lanes that share a row of an mma accumulator.
DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 2));
}
DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(kWholeWarp, x, 1);
  return x + __shfl_xor_sync(kWholeWarp, x, 2);
}
DEVICE float warp_max(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, distance));
  }
  return x;
}

// A log-sum-exp in base 2. Nothing was summed only if the sum is 0: a NaN stays.
DEVICE float log_sum(float maximum, float sum) {
  return sum == 0.0f ? minus_infinity() : maximum + log2_approximate(sum);
}
DEVICE float reciprocal_or_zero(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }
