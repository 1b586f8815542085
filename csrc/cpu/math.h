// exp and tanh on vectors, to about one unit in the last place (Cephes' polynomials), and powers of
// two for weights (polynomials of least relative error over [0, 1]).
#pragma once

#include "types.h"

namespace specattn {

// exp for x <= 80; below -87, where float ends, exactly zero (a masked logit weighs nothing).
template <class Isa>
inline typename Isa::V exp(typename Isa::V x) {
  using V = typename Isa::V;
  const auto vanishes = Isa::less(x, Isa::set1(-87.0f));
  x = Isa::max(Isa::set1(-87.0f), x);  // this order keeps NaN
  const V n = Isa::round(Isa::mul(x, Isa::set1(1.44269504f)));
  V r = Isa::fma(n, Isa::set1(-0.693359375f), x);
  r = Isa::fma(n, Isa::set1(2.12194440e-4f), r);
  V p = Isa::fma(r, Isa::set1(1.9875691500e-4f), Isa::set1(1.3981999507e-3f));
  p = Isa::fma(p, r, Isa::set1(8.3334519073e-3f));
  p = Isa::fma(p, r, Isa::set1(4.1665795894e-2f));
  p = Isa::fma(p, r, Isa::set1(1.6666665459e-1f));
  p = Isa::fma(p, r, Isa::set1(5.0000001201e-1f));
  p = Isa::fma(Isa::mul(r, r), p, Isa::add(r, Isa::set1(1.0f)));
  return Isa::select(vanishes, Isa::zero(), Isa::scale2(p, n));
}

// 2^f of a fraction f in [0, 1]; rough, to 1.4e-7: for weights that are rounded to eight bits
// afterwards, but whose sum makes the log-sum-exp.
template <class Isa, bool rough>
inline typename Isa::V exp2_of_fraction(typename Isa::V f) {
  typename Isa::V p;
  if constexpr (rough) {
    p = Isa::fma(f, Isa::set1(1.867130213e-3f), Isa::set1(9.017030019e-3f));
    p = Isa::fma(p, f, Isa::set1(5.579991332e-2f));
    p = Isa::fma(p, f, Isa::set1(2.401644501e-1f));
    p = Isa::fma(p, f, Isa::set1(6.931513118e-1f));
  } else {
    p = Isa::fma(f, Isa::set1(2.161291636e-4f), Isa::set1(1.246784608e-3f));
    p = Isa::fma(p, f, Isa::set1(9.675451603e-3f));
    p = Isa::fma(p, f, Isa::set1(5.548528060e-2f));
    p = Isa::fma(p, f, Isa::set1(2.402293056e-1f));
    p = Isa::fma(p, f, Isa::set1(6.931470444e-1f));
  }
  return Isa::fma(p, f, Isa::set1(1.0f));
}

// 2^y for y < 127; zero where that is too small for a float, as of -inf.
template <class Isa, bool rough>
inline typename Isa::V exp2(typename Isa::V y) {
  if constexpr (Isa::kScalesFar) {
    return Isa::scale2(exp2_of_fraction<Isa, rough>(Isa::fraction(y)), y);
  } else {
    const auto vanishes = Isa::less(y, Isa::set1(-126.0f));
    y = Isa::max(Isa::set1(-126.0f), y);  // this order keeps NaN
    const typename Isa::V n = Isa::round(Isa::sub(y, Isa::set1(0.5f)));
    const typename Isa::V power = exp2_of_fraction<Isa, rough>(Isa::sub(y, n));
    return Isa::select(vanishes, Isa::zero(), Isa::scale2(power, n));
  }
}

template <class Isa>
inline typename Isa::V tanh(typename Isa::V x) {
  using V = typename Isa::V;
  const V zero = Isa::zero(), one = Isa::set1(1.0f);
  const V magnitude = Isa::max(x, Isa::sub(zero, x));
  // Near zero 1 - 2 / (exp(2x) + 1) would lose the digits that a logit is made of.
  const V z = Isa::mul(x, x);
  V p = Isa::fma(z, Isa::set1(-5.70498872745e-3f), Isa::set1(2.06390887954e-2f));
  p = Isa::fma(p, z, Isa::set1(-5.37397155531e-2f));
  p = Isa::fma(p, z, Isa::set1(1.33314422036e-1f));
  p = Isa::fma(p, z, Isa::set1(-3.33332819422e-1f));
  p = Isa::fma(Isa::mul(p, z), x, x);
  const V twice = Isa::add(magnitude, magnitude);
  const V bounded = Isa::select(Isa::less(Isa::set1(40.0f), twice), Isa::set1(40.0f), twice);
  const V tail = Isa::div(Isa::set1(2.0f), Isa::add(exp<Isa>(bounded), one));
  const V large = Isa::sub(one, tail);
  const V sign = Isa::select(Isa::less(x, zero), Isa::sub(zero, large), large);
  return Isa::select(Isa::less(magnitude, Isa::set1(0.625f)), p, sign);
}

}  // namespace specattn
