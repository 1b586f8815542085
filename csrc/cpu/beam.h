// One level of a beam search: the most probable children of some nodes of a tree.
#pragma once

#include <algorithm>
#include <cmath>

#include "convert.h"
#include "kernels.h"
#include "math.h"

namespace specattn {

// The best candidates so far, best first; of equals the one that came first.
class BestFew {
 public:
  BestFew(const BestChildren& p, int64_t b)
      : scores_(p.best_scores + b * p.best_batch),
        tokens_(p.best_tokens + b * p.best_batch),
        parents_(p.best_parents + b * p.best_batch),
        width_(p.width) {}

  bool takes(float score) const { return count_ < width_ || score > scores_[width_ - 1]; }

  void add(float score, int64_t token, int64_t parent) {
    int64_t at = count_ < width_ ? count_++ : width_ - 1;
    for (; at > 0 && score > scores_[at - 1]; --at) {
      scores_[at] = scores_[at - 1];
      tokens_[at] = tokens_[at - 1];
      parents_[at] = parents_[at - 1];
    }
    scores_[at] = score, tokens_[at] = token, parents_[at] = parent;
  }

 private:
  float* scores_;
  int64_t *tokens_, *parents_;
  int64_t width_, count_ = 0;
};

// Log-probabilities are logits less `top` less `log_sum`. The two are never added: a large logit
// would take the digits of the other.
struct Softmax {
  float top, log_sum;
};

template <class Isa, class Elem>
inline Softmax softmax_of(const Elem* x, int64_t count) {
  auto top = Isa::set1(-kInf), sum = Isa::zero();
  float m = -kInf, rest = 0;
  int64_t i = 0;
  for (; i + Isa::W <= count; i += Isa::W) top = Isa::max(top, Isa::load_as_float(x + i));
  for (; i < count; ++i) m = std::max(m, to_float(x[i]));
  m = std::max(m, Isa::greatest(top));
  const auto pivot = Isa::set1(m);
  for (i = 0; i + Isa::W <= count; i += Isa::W) {
    sum = Isa::add(sum, exp<Isa>(Isa::sub(Isa::load_as_float(x + i), pivot)));
  }
  for (; i < count; ++i) rest += std::exp(to_float(x[i]) - m);
  return {m, std::log(Isa::sum(sum) + rest)};
}

// Of one request.
template <class Isa, class Elem>
void best_children(const BestChildren& p, int64_t b) {
  BestFew best(p, b);
  for (int64_t n = 0; n < p.nodes; ++n) {
    const Elem* x = static_cast<const Elem*>(p.logits) + b * p.logits_batch + n * p.logits_row;
    const float score = p.scores[b * p.scores_batch + n];
    const auto [top, log_sum] = softmax_of<Isa>(x, p.vocabulary);
    const float base = score - log_sum;
    const auto tops = Isa::set1(top), bases = Isa::set1(base);
    int64_t i = 0;
    for (; i + Isa::W <= p.vocabulary; i += Isa::W) {
      const auto v = Isa::add(Isa::sub(Isa::load_as_float(x + i), tops), bases);
      if (!best.takes(Isa::greatest(v))) continue;
      for (int64_t j = i; j < i + Isa::W; ++j) {
        const float candidate = to_float(x[j]) - top + base;
        if (best.takes(candidate)) best.add(candidate, j, n);
      }
    }
    for (; i < p.vocabulary; ++i) {
      const float candidate = to_float(x[i]) - top + base;
      if (best.takes(candidate)) best.add(candidate, i, n);
    }
  }
  for (int64_t i = 0; i < p.width; ++i) {
    int64_t* const parent = p.best_parents + b * p.best_batch + i;
    const int64_t* from = p.masks + b * p.masks_batch + *parent * p.words;
    int64_t* to = p.best_masks + b * p.best_masks_batch + i * p.words;
    std::copy(from, from + p.words, to);
    const int64_t own = p.first + p.nodes + i;
    to[own / 64] |= static_cast<int64_t>(uint64_t{1} << own % 64);
    *parent += p.first;
  }
}

}  // namespace specattn
