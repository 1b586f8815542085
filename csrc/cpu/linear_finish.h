// What follows a product: bias, activation, gate, residual.
#pragma once

#include <algorithm>

#include "convert.h"
#include "linear.h"
#include "linear_rows.h"
#include "math.h"

namespace specattn {

// x / (1 + exp(-y)).
template <class Isa>
inline typename Isa::V times_sigmoid(typename Isa::V x, typename Isa::V y) {
  const auto minus = Isa::sub(Isa::zero(), y), most = Isa::set1(80.0f);
  const auto tiny = Isa::less(most, minus);  // there exp ends, and the sigmoid is as good as zero
  const auto e = exp<Isa>(Isa::select(tiny, most, minus));
  return Isa::div(x, Isa::add(Isa::select(tiny, Isa::set1(kInf), e), Isa::set1(1.0f)));
}

// x * Phi(x), Phi the normal distribution; below zero Phi is small and must not be a difference.
template <class Isa>
inline typename Isa::V gelu(typename Isa::V x) {
  using V = typename Isa::V;
  const V zero = Isa::zero(), one = Isa::set1(1.0f), size = Isa::max(x, Isa::sub(zero, x));
  const V u = Isa::div(one, Isa::fma(size, Isa::set1(0.35f), one));
  // Fitted to Phi(-s) * exp(s * s / 2), to a relative error of 4e-8.
  V p = Isa::set1(-0.0295596962f);
  p = Isa::fma(p, u, Isa::set1(0.145926531f));
  p = Isa::fma(p, u, Isa::set1(-0.259616422f));
  p = Isa::fma(p, u, Isa::set1(0.163455799f));
  p = Isa::fma(p, u, Isa::set1(-0.0259220741f));
  p = Isa::fma(p, u, Isa::set1(0.106634992f));
  p = Isa::fma(p, u, Isa::set1(0.119565027f));
  p = Isa::fma(p, u, Isa::set1(0.139896236f));
  p = Isa::fma(p, u, Isa::set1(0.139619588f));
  const V half = Isa::mul(Isa::mul(size, size), Isa::set1(-0.5f));
  const V tail = Isa::mul(Isa::mul(p, u), exp<Isa>(half));  // Phi(-|x|)
  return Isa::mul(x, Isa::select(Isa::less(x, zero), tail, Isa::sub(one, tail)));
}

template <class Isa>
inline typename Isa::V activate(Activation kind, typename Isa::V x) {
  switch (kind) {
    case Activation::kSilu:
      return times_sigmoid<Isa>(x, x);
    case Activation::kGelu:
      return gelu<Isa>(x);
    case Activation::kGeluTanh: {  // 0.5 * (1 + tanh(y)) is the sigmoid of 2 y
      const auto cubic = Isa::fma(Isa::mul(x, x), Isa::set1(0.071354816f), Isa::set1(1.59576912f));
      return times_sigmoid<Isa>(x, Isa::mul(x, cubic));
    }
    case Activation::kSigmoid:
      return times_sigmoid<Isa>(Isa::set1(1.0f), x);
    default:
      return x;
  }
}

// Up to a whole vector of elements; what does not exist is zero.
template <class Isa, class Elem>
inline typename Isa::V load_up_to(const Elem* p, int count) {
  if (count >= Isa::W) return Isa::load_as_float(p);
  Elem some[Isa::W] = {};
  std::copy(p, p + count, some);
  return Isa::load_as_float(some);
}

template <class Isa, class Elem>
inline void store_up_to(Elem* p, typename Isa::V v, int count) {
  if (count >= Isa::W) return Isa::store_as(p, v);
  Elem some[Isa::W];
  Isa::store_as(some, v);
  std::copy(some, some + count, p);
}

// Outputs [first, first + count) of row `row` of a part, which begin at column `column` of `out`.
template <class Isa, class Elem, class Out>
inline void finish_row(const Linear& p, int part, int64_t row, int64_t first, int64_t column,
                       int count, const float* sums, const float* gated) {
  using V = typename Isa::V;
  const auto biased = [&](int of, const float* from, int c, int left) {
    const V v = Isa::load(from + c);
    const Elem* bias = static_cast<const Elem*>(p.parts[of].bias);
    return bias ? Isa::add(v, load_up_to<Isa>(bias + first + c, left)) : v;
  };
  Out* out = static_cast<Out*>(p.out) + row * p.out_row + column;
  const Out* residual = static_cast<const Out*>(p.residual);
  if (residual) residual += row * p.residual_row + column;
  for (int c = 0; c < count; c += Isa::W) {
    V v = activate<Isa>(p.activation, biased(part, sums, c, count - c));
    if (p.gated) v = Isa::mul(v, biased(1, gated, c, count - c));
    if (residual) v = Isa::add(v, load_up_to<Isa>(residual + c, count - c));
    store_up_to<Isa>(out + c, v, count - c);
  }
}

template <class Isa, class In, class Elem>
void gate_row_of(const Gate& p, int64_t row) {
  const In* first = static_cast<const In*>(p.first) + row * p.first_row;
  const In* second = static_cast<const In*>(p.second) + row * p.second_row;
  Elem* out = static_cast<Elem*>(p.out) + row * p.out_row;
  for (int64_t i = 0; i < p.N; i += Isa::W) {
    const int count = static_cast<int>(std::min<int64_t>(Isa::W, p.N - i));
    const auto gate = activate<Isa>(p.activation, load_up_to<Isa>(first + i, count));
    store_up_to<Isa>(out + i, Isa::mul(gate, load_up_to<Isa>(second + i, count)), count);
  }
}

template <class Isa, class Elem>
void gate_row(const Gate& p, int64_t row) {
  p.in_float ? gate_row_of<Isa, float, Elem>(p, row) : gate_row_of<Isa, Elem, Elem>(p, row);
}

// Up to `most` rows of x. `multiply(weights, next, sums)` is their product with the rows of weights
// of a piece; the rows that are read afterwards begin at `next` of `after`.
template <class Isa, class Elem, int most, class Multiply>
void finish_rows(const Linear& p, int64_t row, const LinearPiece& piece, const Multiply& multiply) {
  alignas(64) float sums[2][most][kMostColumns];
  const int parts = p.gated ? 2 : 1;
  for (int i = 0; i < parts; ++i) {
    const bool last = i + 1 == parts;
    const Linear::Weights& after = p.parts[last ? piece.part : piece.part + 1];
    multiply(p.parts[piece.part + i], after, last ? piece.next : piece.first, sums[i]);
  }
  const auto finish = p.out_float ? finish_row<Isa, Elem, float> : finish_row<Isa, Elem, Elem>;
  for (int r = 0; r < std::min<int64_t>(most, p.M - row); ++r) {
    finish(p, piece.part, row + r, piece.first, piece.column, piece.count, sums[0][r], sums[1][r]);
  }
}

// A few rows of x; `x` is packed.
template <class Isa, class Elem, int rows>
void multiply_rows(const Linear& p, const float* x, int64_t row, const LinearPiece& piece) {
  const auto at = [](const Linear::Weights& w, int64_t first) {
    return static_cast<const Elem*>(w.data) + first * w.stride;
  };
  finish_rows<Isa, Elem, rows>(p, row, piece,
                               [&](const Linear::Weights& w, const Linear::Weights& after,
                                   int64_t next, float (*sums)[kMostColumns]) {
                                 FewRows<Isa, Elem>::template multiply<rows>(
                                     x, p.K, at(w, piece.first), w.stride, piece.count,
                                     at(after, next), sums);
                               });
}

template <class Isa, class Elem>
void pack_linear(const Linear& p, float* to) {
  FewRows<Isa, Elem>::pack(p, to);
}

template <class Isa, class Elem>
void multiply_piece(const Linear& p, const float* x, const LinearPiece& piece) {
  using Few = FewRows<Isa, Elem>;
  constexpr int kMost = Few::rows_at_once(kMostRowsAtOnce);
  const typename Few::Tiles tiles;
  static_cast<void>(tiles);
  for (int64_t row = 0; row < p.M;) {
    const int rows = Few::rows_at_once(p.M - row);
    if constexpr (kMost == kMostRowsAtOnce) {
      multiply_rows<Isa, Elem, kMost>(p, x, row, piece);
    } else {
      if (rows == 1) multiply_rows<Isa, Elem, 1>(p, x, row, piece);
      if (rows == 2) multiply_rows<Isa, Elem, 2>(p, x, row, piece);
      if (rows == 4) multiply_rows<Isa, Elem, 4>(p, x, row, piece);
      if constexpr (kMost == 8) {
        if (rows == 8) multiply_rows<Isa, Elem, 8>(p, x, row, piece);
      }
    }
    row += rows;
    x += Few::packed(rows, p.K);
  }
}

}  // namespace specattn
