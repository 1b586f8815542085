// trees that are drafted larger than they are verified: which candidates are
// expanded, and which are kept.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "operators.h"
#include "check.h"

using namespace specattn;

namespace {

// A row of each request.
template <class T>
struct Table {
  T* data = nullptr;
  int64_t batch = 0;

  Table() = default;
  explicit Table(const View& x) : data(x.as<T>()), batch(x.stride[0]) {}
  T* operator[](int64_t b) const { return data + b * batch; }
};

// Masks [B, nodes, words] of which each request's lie one after the other.
Table<int64_t> dense_masks(const View& masks) {
  if (masks.stride[1] != masks.shape[2]) masks.fail("must lie densely");
  return Table<int64_t>(masks);
}

void set_bit(int64_t* words, int64_t bit) {
  words[bit / 64] |= static_cast<int64_t>(uint64_t{1} << bit % 64);
}

struct ExpandBest : Call {
  int64_t B = 0, candidates = 0, children = 0, nodes = 0, words = 0, width = 0, first = 0;
  Table<const float> scores;
  Table<const int64_t> tokens;
  Table<int64_t> masks, chosen, best_tokens, rows, best_masks;
  Table<float> best_scores;

  void run(int) const override {
    for (int64_t b = 0; b < B; ++b) choose(b);
  }

 private:
  void choose(int64_t b) const {
    const float* score = scores[b];
    int64_t* const best = chosen[b];
    for (int64_t i = 0, found = 0; i < candidates; ++i) {
      if (found == width && !(score[i] > score[best[width - 1]])) continue;
      int64_t at = found < width ? found++ : width - 1;
      for (; at > 0 && score[i] > score[best[at - 1]]; --at) best[at] = best[at - 1];
      best[at] = i;
    }
    for (int64_t i = 0; i < width; ++i) {
      const int64_t parent = best[i] / children;
      best_tokens[b][i] = tokens[b][best[i]], best_scores[b][i] = score[best[i]];
      rows[b][i] = b * nodes + parent;
      int64_t* const mask = best_masks[b] + i * words;
      std::copy_n(masks[b] + parent * words, words, mask);
      set_bit(mask, first + i);
    }
  }
};

Made expand_best(Arguments& next) {
  auto call = std::make_unique<ExpandBest>();
  ExpandBest& p = *call;
  const View tokens = next.tensor("tokens"), scores = next.tensor("scores");
  const View masks = next.tensor("masks");
  p.first = next.value<int64_t>();
  const View chosen = next.tensor("chosen"), best = next.tensor("best_tokens");
  const View best_scores = next.tensor("best_scores"), rows = next.tensor("rows");
  const View best_masks = next.tensor("best_masks");
  tokens.expect(Dtype::kInt64, {-1, -1});
  p.B = tokens.shape[0], p.candidates = tokens.shape[1];
  scores.expect(Dtype::kFloat32, {p.B, p.candidates});
  masks.expect(Dtype::kInt64, {p.B, -1, -1});
  p.nodes = masks.shape[1], p.words = masks.shape[2];
  p.width = chosen.expect(Dtype::kInt64, {p.B, -1}).shape[1];
  if (p.nodes < 1 || p.candidates % p.nodes) tokens.fail("must be as many for every node");
  if (p.width < 1 || p.width > p.candidates) {
    chosen.fail("must be at least one, and at most as many as there are");
  }
  p.children = p.candidates / p.nodes;
  for (const View* x : {&best, &rows}) x->expect(Dtype::kInt64, {p.B, p.width});
  best_scores.expect(Dtype::kFloat32, {p.B, p.width});
  best_masks.expect(Dtype::kInt64, {p.B, p.width, p.words});
  check_index("first", p.first, 0, 64 * p.words - p.width);
  p.tokens = Table<const int64_t>(tokens), p.scores = Table<const float>(scores);
  p.masks = dense_masks(masks), p.best_masks = dense_masks(best_masks);
  p.chosen = Table<int64_t>(chosen), p.best_tokens = Table<int64_t>(best);
  p.best_scores = Table<float>(best_scores), p.rows = Table<int64_t>(rows);
  return call;
}

struct PruneTree : Call {
  int64_t B = 0, candidates = 0, count = 0, words = 0;
  Table<const int64_t> tokens, parents;
  Table<const float> scores;
  Table<int64_t> chosen, kept_tokens, kept_parents, masks;
  Table<int32_t> depths;

  void check() const override {
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t i = 0; i < candidates; ++i) check_index("parents", parents[b][i], -1, i - 1);
    }
  }

  void run(int) const override {
    std::vector<int64_t> order(static_cast<size_t>(candidates));
    for (int64_t b = 0; b < B; ++b) prune(b, order);
  }

 private:
  void prune(int64_t b, std::vector<int64_t>& order) const {
    const auto score = [&](int64_t i) {
      const float x = scores[b][i];
      return std::isnan(x) ? -std::numeric_limits<float>::infinity() : x;
    };
    std::iota(order.begin(), order.end(), int64_t{0});
    const auto end = order.begin() + count;
    std::nth_element(order.begin(), end, order.end(), [&](int64_t i, int64_t j) {
      return score(i) != score(j) ? score(i) > score(j) : i < j;
    });
    std::sort(order.begin(), end);
    std::copy(order.begin(), end, chosen[b]);
    kept_parents[b][0] = -1, depths[b][0] = 0;
    std::fill_n(masks[b], words, 0);
    set_bit(masks[b], 0);
    for (int64_t i = 1; i <= count; ++i) {
      const int64_t from = order[static_cast<size_t>(i - 1)];
      const int64_t parent = std::upper_bound(order.begin(), end, parents[b][from]) - order.begin();
      kept_tokens[b][i] = tokens[b][from], kept_parents[b][i] = parent;
      depths[b][i] = depths[b][parent] + 1;
      std::copy_n(masks[b] + parent * words, words, masks[b] + i * words);
      set_bit(masks[b] + i * words, i);
    }
  }
};

Made prune_tree(Arguments& next) {
  auto call = std::make_unique<PruneTree>();
  PruneTree& p = *call;
  const View tokens = next.tensor("tokens"), scores = next.tensor("scores");
  const View parents = next.tensor("parents"), chosen = next.tensor("chosen");
  const View kept_tokens = next.tensor("kept_tokens"), kept_parents = next.tensor("kept_parents");
  const View depths = next.tensor("depths"), masks = next.tensor("masks");
  tokens.expect(Dtype::kInt64, {-1, -1});
  p.B = tokens.shape[0], p.candidates = tokens.shape[1];
  scores.expect(Dtype::kFloat32, {p.B, p.candidates});
  parents.expect(Dtype::kInt64, {p.B, p.candidates});
  p.count = chosen.expect(Dtype::kInt64, {p.B, -1}).shape[1];
  check_index("count", p.count, 0, p.candidates);
  for (const View* x : {&kept_tokens, &kept_parents}) x->expect(Dtype::kInt64, {p.B, p.count + 1});
  depths.expect(Dtype::kInt32, {p.B, p.count + 1});
  p.words = masks.expect(Dtype::kInt64, {p.B, p.count + 1, p.count / 64 + 1}).shape[2];
  p.tokens = Table<const int64_t>(tokens), p.scores = Table<const float>(scores);
  p.parents = Table<const int64_t>(parents), p.chosen = Table<int64_t>(chosen);
  p.kept_tokens = Table<int64_t>(kept_tokens), p.kept_parents = Table<int64_t>(kept_parents);
  p.depths = Table<int32_t>(depths), p.masks = dense_masks(masks);
  return call;
}

}  // namespace

std::vector<Operator> specattn::candidate_operators() {
  return {
      {"expand_best", &expand_best,
       "Of candidates [B, n * children] the best, of equals the first: tokens, scores, masks of "
       "the n nodes, number of the first of the best; then written: which they are, tokens, "
       "scores, rows of their parents in [B * n], masks."},
      {"prune_tree", &prune_tree,
       "The tree of the most probable of drafted nodes: tokens, scores, parents (-1: the root); "
       "then written: which these are, and of the root and them tokens (but the root's), parents, "
       "depths, masks."},
  };
}
