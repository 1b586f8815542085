#include "suffix.h"

#include <algorithm>
#include <queue>

namespace specattn {

SuffixAutomaton::SuffixAutomaton() : table_(1024, -1) { add_state(0); }

int64_t SuffixAutomaton::bytes() const {
  return static_cast<int64_t>(states_.capacity() * sizeof(State) +
                              edges_.capacity() * sizeof(Edge) +
                              table_.capacity() * sizeof(int32_t));
}

int32_t SuffixAutomaton::add_state(int32_t length) {
  states_.emplace_back();
  states_.back().length = length;
  return static_cast<int32_t>(states_.size() - 1);
}

size_t SuffixAutomaton::slot_of(int32_t s, int32_t token) const {
  uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(s)) << 32;
  key |= static_cast<uint32_t>(token);
  key *= 0x9E3779B97F4A7C15;
  size_t slot = static_cast<size_t>(key >> 20) & (table_.size() - 1);
  for (; table_[slot] >= 0; slot = (slot + 1) & (table_.size() - 1)) {
    const Edge& e = edge(table_[slot]);
    if (e.state == s && e.token == token) break;
  }
  return slot;
}

int32_t SuffixAutomaton::find(int32_t s, int32_t token) const {
  const State& from = state(s);
  if (from.edges <= 1) {  // most have one, which is in no table
    return from.edges && edge(from.first).token == token ? from.first : -1;
  }
  return table_[slot_of(s, token)];
}

void SuffixAutomaton::grow_table() {
  table_.assign(2 * table_.size(), -1);
  for (int32_t e = 0; e < static_cast<int32_t>(edges_.size()); ++e) {
    if (state(edge(e).state).edges > 1) table_[slot_of(edge(e).state, edge(e).token)] = e;
  }
}

void SuffixAutomaton::add_edge(int32_t s, int32_t token, int32_t target) {
  State& from = at(s);
  const auto e = static_cast<int32_t>(edges_.size());
  edges_.push_back({s, token, target, -1, from.first});
  if (from.first >= 0) edges_[static_cast<size_t>(from.first)].before = e;
  const int32_t other = from.first;
  from.first = e;
  if (++from.edges == 1) return;
  const int added = from.edges == 2 ? 2 : 1;
  entries_ += static_cast<size_t>(added);
  if (2 * entries_ > table_.size()) {
    grow_table();
    return;
  }
  if (added == 2) table_[slot_of(s, edge(other).token)] = other;
  table_[slot_of(s, token)] = e;
}

void SuffixAutomaton::bring_forward(int32_t e) {
  Edge& moved = edges_[static_cast<size_t>(e)];
  State& from = at(moved.state);
  if (from.first == e) return;
  edges_[static_cast<size_t>(moved.before)].after = moved.after;
  if (moved.after >= 0) edges_[static_cast<size_t>(moved.after)].before = moved.before;
  edges_[static_cast<size_t>(from.first)].before = e;
  moved.before = -1, moved.after = from.first, from.first = e;
}

// Gives the substrings of q that also end here, which are those of p and the token, a state.
int32_t SuffixAutomaton::split(int32_t p, int32_t token, int32_t q) {
  const int32_t copy = add_state(state(p).length + 1);
  at(copy).link = state(q).link, at(copy).count = state(q).count;
  std::vector<int32_t> list;
  for (int32_t e = state(q).first; e >= 0; e = edge(e).after) list.push_back(e);
  for (auto e = list.rbegin(); e != list.rend(); ++e) {
    const Edge old = edge(*e);
    add_edge(copy, old.token, old.target);
  }
  for (; p >= 0; p = state(p).link) {
    const int32_t e = find(p, token);
    if (edge(e).target != q) break;
    edges_[static_cast<size_t>(e)].target = copy;
  }
  at(q).link = copy;
  return copy;
}

namespace {

// What a match of some length is worth before anything is known.
constexpr double kPriorKnown[] = {0.3, 0.45, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.9, 0.9};

}  // namespace

int SuffixDrafter::length_class(int32_t length) {
  if (length <= 4) return std::max(length, 1) - 1;
  if (length <= 6) return 4;
  if (length <= 8) return 5;
  if (length <= 12) return 6;
  if (length <= 16) return 7;
  if (length <= 24) return 8;
  if (length <= 32) return 9;
  return length <= 64 ? 10 : 11;
}

SuffixDrafter::SuffixDrafter() {
  for (const double prior : kPriorKnown) known_.insert(known_.end(), 2, Share(prior));
  ranks_.assign(kMostRanks, Share(0.3));
}

// Books at which rank a token stood that no match knew.
void SuffixDrafter::learn_rank(int32_t token, const Successors& successors) {
  const int32_t* ranked = successors.after(newest_);
  const int64_t most = std::min<int64_t>(successors.k, kMostRanks);
  for (int64_t r = 0; ranked && r < most && ranked[r] >= 0; ++r) {
    ranks_[static_cast<size_t>(r)].add(ranked[r] == token);
    if (ranked[r] == token) return;
  }
}

void SuffixDrafter::extend(int32_t token, const Successors& successors) {
  bool found = false;
  int levels = 0;
  automaton_.extend(token, [&](const SuffixAutomaton::State& from, bool hit) {
    if (levels++ >= kLevels) return;
    known_[static_cast<size_t>(2 * length_class(from.length) + (from.edges == 1))].add(hit);
    found = found || hit;
  });
  if (!found) learn_rank(token, successors);
  newest_ = token;
}

// What may follow a context of which the last `length` tokens lead to `state`, and `token` is the
// last; each token once.
void SuffixDrafter::candidates(int32_t state, int32_t length, int32_t token,
                               const Successors& successors, std::vector<Candidate>& found) const {
  found.clear();
  const auto add = [&](int32_t next, int32_t target, int32_t matched, float probability) {
    for (Candidate& one : found) {
      if (one.token != next) continue;
      one.probability += probability;
      return;
    }
    found.push_back({next, target, matched, probability});
  };
  float rest = 1;
  int32_t s = state;
  for (int level = 0; s > SuffixAutomaton::kRoot && level < kLevels; ++level) {
    const auto& from = automaton_.state(s);
    if (from.edges) {
      int64_t total = 0;
      int scanned = 0;
      for (int32_t e = from.first; e >= 0 && scanned < kMostEdges; ++scanned) {
        total += automaton_.state(automaton_.edge(e).target).count;
        e = automaton_.edge(e).after;
      }
      const float mass = rest * known(length, from.edges == 1).value();
      scanned = 0;
      for (int32_t e = from.first; e >= 0 && scanned < kMostEdges; ++scanned) {
        const auto& edge = automaton_.edge(e);
        const auto times = static_cast<float>(automaton_.state(edge.target).count);
        add(edge.token, edge.target, length + 1, mass * times / static_cast<float>(total));
        e = edge.after;
      }
      rest -= mass;
    }
    if (rest < kNegligible) return;
    s = from.link;
    if (s >= 0) length = automaton_.state(s).length;
  }
  const int32_t* ranked = successors.after(token);
  const int64_t most = std::min<int64_t>(successors.k, kMostRanks);
  for (int64_t r = 0; ranked && r < most && ranked[r] >= 0; ++r) {
    const float mass = rest * ranks_[static_cast<size_t>(r)].value();
    // It was met before, if at all, in another context.
    const int32_t target = automaton_.next(SuffixAutomaton::kRoot, ranked[r]);
    add(ranked[r], std::max(target, SuffixAutomaton::kRoot), target >= 0, mass);
    rest -= mass;
  }
}

SuffixTree SuffixDrafter::draft(int64_t nodes, int64_t depth, float least,
                                const Successors& successors) const {
  SuffixTree tree;
  const auto less = [](const Node& a, const Node& b) { return a.probability < b.probability; };
  std::priority_queue<Node, std::vector<Node>, decltype(less)> waiting(less);
  std::vector<Candidate> found;
  const auto expand = [&](const Node& node, int32_t number) {
    candidates(node.state, node.length, node.token, successors, found);
    for (const Candidate& one : found) {
      const float probability = node.probability * one.probability;
      if (probability < least) continue;
      waiting.push({probability, number, one.token, one.state, one.length, node.depth + 1});
    }
  };
  if (nodes < 1 || depth < 1) return tree;
  const int32_t match = automaton_.match();
  expand({1, -1, newest_, match, automaton_.state(match).length, 0}, -1);
  while (!waiting.empty() && static_cast<int64_t>(tree.tokens.size()) < nodes) {
    const Node node = waiting.top();
    waiting.pop();
    const auto number = static_cast<int32_t>(tree.tokens.size());
    tree.parents.push_back(node.parent), tree.tokens.push_back(node.token);
    tree.probabilities.push_back(node.probability);
    if (node.depth < depth) expand(node, number);
  }
  return tree;
}

}  // namespace specattn
