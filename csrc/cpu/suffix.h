// What followed the end of a text where it occurred before: a suffix automaton (Blumer and others,
// 1985) that grows token by token, and trees of continuations, the most probable first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "corpus.h"

namespace specattn {

// The automaton. A state stands for the substrings that end at the same places; of these the
// longest has `length` tokens, and `link` is the state of the longest suffix that ends elsewhere
// too.
class SuffixAutomaton {
 public:
  struct State {
    int32_t length = 0, link = -1;
    int32_t first = -1, edges = 0;  // the list of its edges, those taken last in front
    int32_t count = 0;              // how often its substrings occur
  };
  struct Edge {
    int32_t state, token, target;
    int32_t before, after;  // in the list
  };
  static constexpr int32_t kRoot = 0;
  static constexpr int kOrdered = 16;  // longer lists of edges are kept in order
  // A text that repeats a period has as many suffixes that end elsewhere as it has tokens: more
  // than these are not counted.
  static constexpr int kMostCounted = 128;

  SuffixAutomaton();

  // Calls `visit(state, whether the token followed it before)` for the suffixes of the text that
  // occurred before, the longest first, up to the first which the token followed.
  template <class Visit>
  void extend(int32_t token, const Visit& visit);
  int64_t size() const { return states_[static_cast<size_t>(last_)].length; }
  int64_t bytes() const;
  // The longest suffix of the text that occurred before; the root where there is none.
  int32_t match() const { return last_ == kRoot ? kRoot : state(last_).link; }
  const State& state(int32_t s) const { return states_[static_cast<size_t>(s)]; }
  const Edge& edge(int32_t e) const { return edges_[static_cast<size_t>(e)]; }
  // Where a token leads, or -1.
  int32_t next(int32_t s, int32_t token) const {
    const int32_t e = find(s, token);
    return e < 0 ? -1 : edge(e).target;
  }

 private:
  State& at(int32_t s) { return states_[static_cast<size_t>(s)]; }
  int32_t add_state(int32_t length);
  int32_t find(int32_t s, int32_t token) const;
  void add_edge(int32_t s, int32_t token, int32_t target);
  void bring_forward(int32_t e);
  int32_t split(int32_t p, int32_t token, int32_t q);
  size_t slot_of(int32_t s, int32_t token) const;
  void grow_table();

  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<int32_t>
      table_;  // edges by (state, token), where a state has several; open addressing
  size_t entries_ = 0;
  int32_t last_ = kRoot;
};

template <class Visit>
void SuffixAutomaton::extend(int32_t token, const Visit& visit) {
  const int32_t current = add_state(state(last_).length + 1);
  int32_t p = last_, e = -1;
  for (; p >= 0 && (e = find(p, token)) < 0; p = state(p).link) {
    if (p != last_ && p != kRoot) visit(state(p), false);
    add_edge(p, token, current);
  }
  if (p < 0) {
    at(current).link = kRoot;
  } else {
    if (p != kRoot) visit(state(p), true);
    const int32_t q = edge(e).target;
    at(current).link = state(q).length == state(p).length + 1 ? q : split(p, token, q);
    int counted = 0;
    for (; p >= 0 && counted < kMostCounted; p = state(p).link, ++counted) {
      if (state(p).edges > kOrdered) bring_forward(find(p, token));
    }
  }
  last_ = current;
  int counted = 0;
  for (int32_t s = current; s > kRoot && counted < kMostCounted; s = state(s).link, ++counted) {
    ++at(s).count;
  }
}

// For every token of the vocabulary those that the model ranked best after it: Token Recycling.
struct Successors {
  const int32_t* tokens = nullptr;  // [vocabulary, k]; -1 where nothing is known
  int64_t vocabulary = 0, k = 0, row = 0;

  const int32_t* after(int32_t token) const {
    return tokens && token >= 0 && token < vocabulary ? tokens + token * row : nullptr;
  }
};

// How often something held, of late.
class Share {
 public:
  explicit Share(double prior) : hits_(kPrior * prior), tries_(kPrior) {}
  void add(bool hit) {
    hits_ += hit, tries_ += 1;
    if (tries_ > kMost) hits_ /= 2, tries_ /= 2;
  }
  float value() const { return static_cast<float>(hits_ / tries_); }

 private:
  static constexpr double kPrior = 4, kMost = 512;
  double hits_, tries_;
};

// What chances came to, of late: of several ranges of them, how often it happened for each time
// that was expected.
class Correction {
 public:
  void add(float chance, bool happened) {
    Range& range = of(chance);
    range.expected += chance, range.happened += happened;
    if (range.expected > kMost) range.expected /= 2, range.happened /= 2;
  }
  float corrected(float chance) const {
    const Range& range = const_cast<Correction*>(this)->of(chance);
    const auto likely = static_cast<float>(chance * range.happened / range.expected);
    return std::min(likely, std::max(chance, kNearlyCertain));
  }

 private:
  static constexpr double kPrior = 4, kMost = 256;
  static constexpr float kNearlyCertain = 0.995f;
  static constexpr float kBelow[] = {0.3f, 0.6f, 0.9f};
  struct Range {
    double expected = kPrior, happened = kPrior;
  };
  Range& of(float chance) {
    size_t i = 0;
    while (i < std::size(kBelow) && chance >= kBelow[i]) ++i;
    return ranges_[i];
  }
  Range ranges_[std::size(kBelow) + 1];
};

struct SuffixTree {
  std::vector<int32_t> parents, tokens;  // the root apart, which is -1; parents come first
  std::vector<float> probabilities;      // of the whole path; descending
};

// What verifying so many rows of a request, the root's included, takes; ascending.
struct PassTimes {
  std::vector<int64_t> rows;
  std::vector<double> seconds;
};

// Estimates what follows a text from its own repetitions and from corpora, the longest match first,
// of equally long ones the text's own: with a probability that is learned by the length of a match,
// the next token is among those that followed it before, as often as each did; else the next
// shorter match decides, and at last the successors. What was generated repeats itself less than
// what was given, or more: it corrects these probabilities.
class SuffixDrafter {
 public:
  explicit SuffixDrafter(std::vector<std::shared_ptr<const Corpus>> corpora = {});

  void extend(const std::vector<int32_t>& tokens, const Successors& successors,
              bool generated = false);
  int32_t newest() const { return newest_; }  // -1 of an empty text
  // Of all paths the `nodes` most probable of at most `depth` tokens, none below `least`.
  // `goes_on`, if given, is asked before each node with its probability.
  using GoesOn = std::function<bool(const SuffixTree&, float)>;
  SuffixTree draft(int64_t nodes, int64_t depth, float least, const Successors& successors,
                   const GoesOn& goes_on = {}) const;
  const SuffixAutomaton& automaton() const { return automaton_; }

 private:
  struct Node {
    float probability;
    int32_t parent, token, state, length, depth;
  };
  struct Candidate {
    int32_t token, state, length;  // a state below 0 is looked for
    float probability;
  };
  using Matches = std::vector<Corpus::Match>;  // by corpus
  static constexpr int kLengths = 12, kMostRanks = 16;
  static constexpr int kLevels = 6;  // matches of one text that are asked
  static constexpr int kMostEdges = SuffixAutomaton::kOrdered;  // continuations of a match
  static constexpr float kNegligible = 0.02f;                   // what shorter matches may decide
  static constexpr size_t kFollowed = 2048;  // newest tokens that corpora are asked about

  static int length_class(int32_t length);
  static size_t kind(int32_t length, bool single) {
    return static_cast<size_t>(2 * length_class(length) + single);
  }
  void append(int32_t token, bool followed, const Successors& successors);
  void learn_rank(int32_t token, const Successors& successors);
  void learn_truth(int32_t token, const Successors& successors);
  Node end() const;  // of the text
  // The matches of a context; `before` are those without its last token, if known.
  Matches followed(const Matches& before, const std::vector<int32_t>& context) const;
  void candidates(const Node& node, const Matches& matches, const Successors& successors,
                  std::vector<Candidate>& found) const;
  void collect(const Node& node, const Matches& matches, const Successors& successors,
               std::vector<Candidate>& found) const;

  SuffixAutomaton automaton_;
  std::vector<Share> known_;  // whether a token followed a match before; by length and singleness
  std::vector<Share> ranks_;  // whether a token is the successor of a rank, of those without one
  int32_t newest_ = -1;
  Correction correction_;

  std::vector<std::shared_ptr<const Corpus>> corpora_;
  std::vector<Share> corpora_known_;  // as `known_`, of all corpora
  std::vector<int32_t> recent_;       // the text's end, where there are corpora
  Matches matches_;
};

// Trees for requests that are verified in one pass, of the size with the most tokens per second:
// each request gains one token, and the probabilities of its nodes. Of sizes that gain as much the
// smallest.
std::vector<SuffixTree> best_trees(const std::vector<const SuffixDrafter*>& requests,
                                   const std::vector<int64_t>& depths, const PassTimes& times,
                                   const Successors& successors);

}  // namespace specattn
