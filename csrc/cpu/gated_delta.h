// The gated delta rule over a tree, a head at a time (reference/gated_delta_tree.py has the
// equations). Every row's key and query, decayed as along its path, meet the state in one pass over
// it; then rows are solved in order, each from those on its path alone.
//
// The bits of a row follow from its path: neither other rows nor threads change them.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "convert.h"
#include "denormals.h"
#include "kernels.h"
#include "math.h"
#include "recurrent.h"

namespace specattn {

template <class Isa, class Elem>
class GatedDeltaHead {
  using V = typename Isa::V;
  static constexpr int W = Isa::W;
  static constexpr bool kReadsInOrder = Isa::kScoreAccumulators >= 16;  // eight vectors of columns

 public:
  GatedDeltaHead(const GatedDelta& p, int64_t head, int64_t next, float* scratch)
      : p_(p),
        b_(head / p.Hv),
        h_(head % p.Hv),
        next_(next),
        rows_(p.tree.rows(b_)),
        at_(scratch, p),
        ahead_(p.state, p.Hv, next, p.Dk, p.Dv) {
    at_.known = at_.d + rows_ * p.Dv;
  }

  void run() {
    for (int64_t i = 0; i < rows_; ++i) load(i);
    read_state();
    for (int64_t i = 0; i < rows_; ++i) {
      if (next_ >= 0) fetch(next_ / p_.Hv, next_ % p_.Hv, i);
      solve(i);
    }
  }

 private:
  static int64_t rows_at_once(int64_t left) {
    return left >= 6 && left != 8 ? 6 : left >= 4 ? 4 : 2;
  }

  const float* decays(int64_t i) const { return stash(i) + p_.Dk + p_.Dv; }
  float* stash(int64_t i) const { return p_.stash.template out<float>(p_.tree, b_, i, h_); }

  // A row that is met next, where there is one, and where its results will lie: they are far apart.
  void fetch(int64_t b, int64_t h, int64_t i) const {
    if (i >= p_.tree.rows(b)) return;
    constexpr int64_t kElem = sizeof(Elem), kFloat = sizeof(float);
    const int64_t of_keys = h / (p_.Hv / p_.Hk);
    fetch_lines(p_.k.template at<Elem>(p_.tree, b, i, of_keys), p_.Dk * kElem);
    fetch_lines(p_.q.template at<Elem>(p_.tree, b, i, of_keys), p_.Dk * kElem);
    fetch_lines(p_.v.template at<Elem>(p_.tree, b, i, h), p_.Dv * kElem);
    fetch_lines(p_.out.template at<Elem>(p_.tree, b, i, h), p_.Dv * kElem);
    const int64_t kept = p_.Dk + p_.Dv + p_.decays;
    fetch_lines(p_.stash.template at<float>(p_.tree, b, i, h), kept * kFloat);
  }

  // A row's key, query and decays; its parent's came before.
  void load(int64_t i) {
    float* const kept = stash(i);
    const int64_t head = h_ / (p_.Hv / p_.Hk);
    widen(p_.k.template at<Elem>(p_.tree, b_, i, head), 1.0f, at_.k + i * p_.Dk);
    widen(p_.q.template at<Elem>(p_.tree, b_, i, head), p_.scale, at_.q + i * p_.Dk);
    std::copy_n(at_.k + i * p_.Dk, p_.Dk, kept);
    float* const decay = kept + p_.Dk + p_.Dv;
    const float* g = p_.g.template at<float>(p_.tree, b_, i, p_.decays == 1 ? 0 : h_);
    if (p_.decays == 1) {
      decay[0] = std::exp(g[h_]);
    } else {
      int64_t c = 0;
      for (; c + W <= p_.Dk; c += W) Isa::store(decay + c, exp<Isa>(Isa::load(g + c)));
      for (; c < p_.Dk; ++c) decay[c] = std::exp(g[c]);
    }
    const int64_t parent = p_.tree.parent(b_, i);
    float* const since = at_.since + i * p_.decays;
    for (int64_t c = 0; c < p_.decays; ++c) {
      since[c] = parent < 0 ? decay[c] : decay[c] * at_.since[parent * p_.decays + c];
    }
  }

  void widen(const Elem* from, float factor, float* to) const {
    V squares = Isa::zero();
    float rest = 0;
    int64_t c = 0;
    for (; c + W <= p_.Dk; c += W) {
      const V v = Isa::load_as_float(from + c);
      squares = Isa::fma(v, v, squares);
      Isa::store(to + c, v);
    }
    for (; c < p_.Dk; ++c) {
      to[c] = to_float(from[c]);
      rest += to[c] * to[c];
    }
    if (p_.l2_norm) factor /= std::sqrt(Isa::sum(squares) + rest + 1e-6f);
    for (c = 0; c < p_.Dk; ++c) to[c] *= factor;
  }

  // d = S^T (decayed keys), known = S^T (decayed queries). Rows of the state are taken as many at a
  // time as lie in the L1 cache: columns of the whole would share too few of its sets. A single row
  // meets them once only, so in the order of memory.
  void read_state() {
    decay();
    const bool once = kReadsInOrder && rows_ == 1;
    const int64_t depth = once ? p_.Dk : std::max<int64_t>(tuning.state_floats / p_.Dv, 8);
    int64_t column = p_.Dv / (4 * W) * (4 * W);
    for (int64_t c = 0; c < p_.Dk; c += depth) multiply(c, std::min(depth, p_.Dk - c), column);
    for (; column < p_.Dv; column += 8) last_columns(column);
  }

  // All rows with `depth` rows of the state from `c` on, up to column `end`. What lies `ahead` is
  // fetched evenly over all of them: more lines at once than a core can wait for would stall it.
  void multiply(int64_t c, int64_t depth, int64_t end) {
    if (2 * rows_ <= 6) return multiply<4>(c, depth, end);
    return 2 * rows_ <= 18 ? multiply<2>(c, depth, end) : multiply<1>(c, depth, end);
  }

  template <int lines>
  void multiply(int64_t c, int64_t depth, int64_t end) {
    const int64_t count = 2 * rows_;
    int64_t column = 0;
    if constexpr (kReadsInOrder) {
      for (; count == 2 && column + 8 * W <= end; column += 8 * W) {
        multiply<2, 2 * lines, 8>(0, column, c, depth);
      }
    }
    for (; column < end; column += 4 * W) {
      for (int64_t r = 0; r < count;) {
        const int64_t block = rows_at_once(count - r);
        if (block == 6) {
          multiply<6, lines>(r, column, c, depth);
        } else if (block == 4) {
          multiply<4, lines>(r, column, c, depth);
        } else {
          multiply<2, lines>(r, column, c, depth);  // a single row: nothing else leaves two
        }
        r += block;
      }
    }
  }

  // The keys, then the queries, decayed as along their paths.
  void decay() {
    const int64_t count = 2 * rows_;
    for (int64_t row = 0; row < count; ++row) {
      const int64_t i = row < rows_ ? row : row - rows_;
      const float* const from = (row < rows_ ? at_.k : at_.q) + i * p_.Dk;
      const float* const since = at_.since + i * p_.decays;
      float* const to = at_.x + row * p_.Dk;
      if (p_.decays == 1) {
        for (int64_t c = 0; c < p_.Dk; ++c) to[c] = from[c] * since[0];
      } else {
        for (int64_t c = 0; c < p_.Dk; ++c) to[c] = from[c] * since[c];
      }
    }
  }

  // Some vectors of columns of rows [first, first + rows).
  template <int rows, int lines, int columns = 4>
  void multiply(int64_t first, int64_t column, int64_t c, int64_t depth) {
    constexpr int kColumns = Isa::kScoreAccumulators / rows >= columns ? columns : 2;
    const int64_t stride = p_.state.row, Dk = p_.Dk;
    for (int part = 0; part < columns; part += kColumns) {
      const float* x = at_.x + first * p_.Dk + c;
      const float* s = p_.state.at(b_, h_) + c * stride + column + part * W;
      float* const sums = at_.d + first * p_.Dv + column + part * W;
      AheadLines ahead = ahead_;
      V acc[rows][kColumns];
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < kColumns; ++n) {
          acc[r][n] = c == 0 ? Isa::zero() : Isa::load(sums + r * p_.Dv + n * W);
        }
      }
      for (int64_t left = depth; left > 0; --left, ++x, s += stride) {
        ahead.touch(lines);
        V v[kColumns];
#pragma GCC unroll 8
        for (int n = 0; n < kColumns; ++n) v[n] = Isa::load(s + n * W);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
          const V factor = Isa::set1(x[r * Dk]);
#pragma GCC unroll 8
          for (int n = 0; n < kColumns; ++n) acc[r][n] = Isa::fma(factor, v[n], acc[r][n]);
        }
      }
      ahead_ = ahead;
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < kColumns; ++n) Isa::store(sums + r * p_.Dv + n * W, acc[r][n]);
      }
    }
  }

  // Eight columns that fill no four vectors: rare sizes.
  void last_columns(int64_t column) {
    const int64_t count = 2 * rows_;
    for (int64_t row = 0; row < count; ++row) {
      const float* const x = at_.x + row * p_.Dk;
      float acc[8] = {};
      for (int64_t c = 0; c < p_.Dk; ++c) {
        const float* const s = p_.state.at(b_, h_) + c * p_.state.row + column;
        for (int n = 0; n < 8; ++n) acc[n] += x[c] * s[n];
      }
      std::copy_n(acc, 8, at_.d + row * p_.Dv + column);
    }
  }

  // What the ancestors' updates weigh in a row's key and query, nearest first; returns how many.
  int64_t weigh(int64_t i) {
    int64_t count = 0;
    for (int64_t j = p_.tree.parent(b_, i); j >= 0; j = p_.tree.parent(b_, j)) path_[count++] = j;
    if (p_.decays == 1) {
      weigh_products(i, count);
    } else {
      weigh_channels(i, count);
    }
    return count;
  }

  void weigh_products(int64_t i, int64_t count) {
    constexpr int kOnce = W / 2;  // ancestors, each met by the key and by the query
    const float *k = at_.k + i * p_.Dk, *q = at_.q + i * p_.Dk;
    float behind = *decays(i);
    for (int64_t first = 0; first < count; first += kOnce) {
      const float* of[kOnce];
      for (int n = 0; n < kOnce; ++n) {
        of[n] = at_.k + path_[std::min(first + n, count - 1)] * p_.Dk;
      }
      V acc[W];
#pragma GCC unroll 16
      for (int n = 0; n < W; ++n) acc[n] = Isa::zero();
      int64_t c = 0;
      for (; c + W <= p_.Dk; c += W) {
        const V of_k = Isa::load(k + c), of_q = Isa::load(q + c);
#pragma GCC unroll 8
        for (int n = 0; n < kOnce; ++n) {
          const V v = Isa::load(of[n] + c);
          acc[n] = Isa::fma(of_k, v, acc[n]);
          acc[kOnce + n] = Isa::fma(of_q, v, acc[kOnce + n]);
        }
      }
      float sums[W];
      Isa::store(sums, Isa::sum_each(acc));
      for (int n = 0; n < kOnce && first + n < count; ++n) {
        for (int64_t rest = c; rest < p_.Dk; ++rest) {
          sums[n] += k[rest] * of[n][rest];
          sums[kOnce + n] += q[rest] * of[n][rest];
        }
        in_key_[first + n] = behind * sums[n];
        in_query_[first + n] = behind * sums[kOnce + n];
        behind *= *decays(path_[first + n]);
      }
    }
  }

  void weigh_channels(int64_t i, int64_t count) {
    const float *k = at_.k + i * p_.Dk, *q = at_.q + i * p_.Dk;
    float* const fading = at_.fading;
    std::copy_n(decays(i), p_.Dk, fading);
    for (int64_t n = 0; n < count; ++n) {
      const float *of = at_.k + path_[n] * p_.Dk, *decay = decays(path_[n]);
      V in_key = Isa::zero(), in_query = Isa::zero();
      float key_rest = 0, query_rest = 0;
      int64_t c = 0;
      for (; c + W <= p_.Dk; c += W) {
        const V f = Isa::load(fading + c), v = Isa::mul(f, Isa::load(of + c));
        in_key = Isa::fma(Isa::load(k + c), v, in_key);
        in_query = Isa::fma(Isa::load(q + c), v, in_query);
        Isa::store(fading + c, Isa::mul(f, Isa::load(decay + c)));
      }
      for (; c < p_.Dk; ++c) {
        key_rest += k[c] * fading[c] * of[c];
        query_rest += q[c] * fading[c] * of[c];
        fading[c] *= decay[c];
      }
      in_key_[n] = Isa::sum(in_key) + key_rest;
      in_query_[n] = Isa::sum(in_query) + query_rest;
    }
  }

  // d = beta (v - S^T k - what ancestors added to it); out = S^T q + what they and d add to it.
  void solve(int64_t i) {
    const int64_t count = weigh(i);
    const float *k = at_.k + i * p_.Dk, *q = at_.q + i * p_.Dk;
    const float own = dot(k, q);
    const float beta = p_.beta.template at<float>(p_.tree, b_, i)[h_];
    const Elem* const v = p_.v.template at<Elem>(p_.tree, b_, i, h_);
    Elem* const out = p_.out.template out<Elem>(p_.tree, b_, i, h_);
    float *const d = at_.d + i * p_.Dv, *const known = at_.known + i * p_.Dv;
    float* const kept = stash(i) + p_.Dk;
    int64_t c = 0;
    const auto columns = [&](auto solved) {
      constexpr int kColumns = decltype(solved)::value;
      for (; c + kColumns * W <= p_.Dv; c += kColumns * W) {
        solve_columns<kColumns>(c, count, own, beta, v, d, known, kept, out);
      }
    };
    columns(std::integral_constant<int, 4>());
    columns(std::integral_constant<int, 1>());
    for (; c < p_.Dv; ++c) {
      float in_key = d[c], in_query = known[c];
      for (int64_t n = 0; n < count; ++n) {
        const float update = at_.d[path_[n] * p_.Dv + c];
        in_key += in_key_[n] * update;
        in_query += in_query_[n] * update;
      }
      d[c] = kept[c] = beta * (to_float(v[c]) - in_key);
      out[c] = from_float<Elem>(in_query + own * d[c]);
    }
  }

  template <int columns>
  void solve_columns(int64_t c, int64_t count, float own, float beta, const Elem* v, float* d,
                     const float* known, float* kept, Elem* out) const {
    V in_key[columns], in_query[columns];
#pragma GCC unroll 4
    for (int n = 0; n < columns; ++n) {
      in_key[n] = Isa::load(d + c + n * W);
      in_query[n] = Isa::load(known + c + n * W);
    }
    for (int64_t j = 0; j < count; ++j) {
      const float* const update = at_.d + path_[j] * p_.Dv + c;
      const V key = Isa::set1(in_key_[j]), query = Isa::set1(in_query_[j]);
#pragma GCC unroll 4
      for (int n = 0; n < columns; ++n) {
        const V u = Isa::load(update + n * W);
        in_key[n] = Isa::fma(key, u, in_key[n]);
        in_query[n] = Isa::fma(query, u, in_query[n]);
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < columns; ++n) {
      const int64_t at = c + n * W;
      const V fresh = Isa::sub(Isa::load_as_float(v + at), in_key[n]);
      const V update = Isa::mul(Isa::set1(beta), fresh);
      Isa::store(d + at, update);
      Isa::store(kept + at, update);
      Isa::store_as(out + at, Isa::fma(Isa::set1(own), update, in_query[n]));
    }
  }

  float dot(const float* a, const float* b) const {
    V sum = Isa::zero();
    float rest = 0;
    int64_t c = 0;
    for (; c + W <= p_.Dk; c += W) sum = Isa::fma(Isa::load(a + c), Isa::load(b + c), sum);
    for (; c < p_.Dk; ++c) rest += a[c] * b[c];
    return Isa::sum(sum) + rest;
  }

  const GatedDelta& p_;
  const int64_t b_, h_, next_, rows_;
  GatedDeltaScratch at_;
  AheadLines ahead_;
  int64_t path_[kMostNodes];
  float in_key_[kMostNodes], in_query_[kMostNodes];
};

template <class Isa, class Elem>
void gated_delta(const GatedDelta& p, int64_t head, int64_t next, float* scratch) {
  [[maybe_unused]] const FlushToZero flush;
  GatedDeltaHead<Isa, Elem>(p, head, next, scratch).run();
}

}  // namespace specattn
