#include "suffix.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <tuple>

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

SuffixDrafter::SuffixDrafter(std::vector<std::shared_ptr<const Corpus>> corpora)
    : corpora_(std::move(corpora)) {
  for (const double prior : kPriorKnown) known_.insert(known_.end(), 2, Share(prior));
  corpora_known_ = known_;
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

SuffixDrafter::Node SuffixDrafter::end() const {
  const int32_t match = automaton_.match();
  return {1, -1, newest_, match, automaton_.state(match).length, 0};
}

// Books which of the tokens that were thought possible came.
void SuffixDrafter::learn_truth(int32_t token, const Successors& successors) {
  std::vector<Candidate> thought;
  collect(end(), matches_, successors, thought);
  for (const Candidate& one : thought) correction_.add(one.probability, one.token == token);
}

void SuffixDrafter::extend(const std::vector<int32_t>& tokens, const Successors& successors,
                           bool generated) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (generated) learn_truth(tokens[i], successors);
    append(tokens[i], i + kFollowed >= tokens.size(), successors);
  }
}

void SuffixDrafter::append(int32_t token, bool followed, const Successors& successors) {
  struct Level {
    int32_t length;
    bool hit;
    Share* share;
  };
  std::vector<Level> levels;
  automaton_.extend(token, [&](const SuffixAutomaton::State& from, bool hit) {
    if (levels.size() >= kLevels) return;
    levels.push_back({from.length, hit, &known_[kind(from.length, from.edges == 1)]});
  });
  for (size_t c = 0; c < matches_.size(); ++c) {
    const Corpus::Match& match = matches_[c];
    if (match.length == 0) continue;
    const bool hit = corpora_[c]->narrowed(match, token).length > 0;
    const Level level = {match.length, hit,
                         &corpora_known_[kind(match.length, corpora_[c]->single(match))]};
    const auto shorter = [&](const Level& one) { return one.length < match.length; };
    levels.insert(std::find_if(levels.begin(), levels.end(), shorter), level);
  }
  bool found = false;
  for (auto level = levels.begin(); level != levels.end() && !found; ++level) {
    level->share->add(level->hit);
    found = level->hit;
  }
  if (!found) learn_rank(token, successors);
  newest_ = token;
  if (corpora_.empty()) return;
  recent_.push_back(token);
  if (recent_.size() > 1024) recent_.erase(recent_.begin(), recent_.end() - Corpus::kLongest);
  matches_ = followed ? this->followed(matches_, recent_) : Matches();
}

SuffixDrafter::Matches SuffixDrafter::followed(const Matches& before,
                                               const std::vector<int32_t>& context) const {
  Matches matches(corpora_.size());
  const auto size = static_cast<int64_t>(context.size());
  for (size_t c = 0; c < corpora_.size(); ++c) {
    const Corpus& corpus = *corpora_[c];
    if (!before.empty() && before[c].length) {
      matches[c] = corpus.narrowed(before[c], context.back());
    }
    if (matches[c].length && matches[c].length <= Corpus::kLongest) continue;
    const int32_t most = before.empty() ? Corpus::kLongest : std::max(before[c].length, 1);
    matches[c] = corpus.longest(context.data(), size, most);
  }
  return matches;
}

// What may follow a node's context, whose end of `length` tokens leads to its state; each token
// once.
void SuffixDrafter::candidates(const Node& node, const Matches& matches,
                               const Successors& successors, std::vector<Candidate>& found) const {
  collect(node, matches, successors, found);
  for (Candidate& one : found) {
    for (int32_t s = node.state; one.state < 0 && s >= SuffixAutomaton::kRoot;) {
      one.state = automaton_.next(s, one.token);
      one.length = (s == node.state ? node.length : automaton_.state(s).length) + 1;
      s = automaton_.state(s).link;
    }
    if (one.state < 0) one.state = SuffixAutomaton::kRoot, one.length = 0;
  }
}

void SuffixDrafter::collect(const Node& node, const Matches& matches, const Successors& successors,
                            std::vector<Candidate>& found) const {
  found.clear();
  const auto add = [&](int32_t next, int32_t target, int32_t matched, float probability) {
    for (Candidate& one : found) {
      if (one.token != next) continue;
      one.probability += probability;
      if (one.state < 0) one.state = target, one.length = matched;
      return;
    }
    found.push_back({next, target, matched, probability});
  };
  float rest = 1;
  std::vector<std::tuple<int32_t, size_t>> waiting;  // corpora by their matches' lengths
  for (size_t c = 0; c < matches.size(); ++c) {
    if (matches[c].length) waiting.emplace_back(-matches[c].length, c);
  }
  std::sort(waiting.begin(), waiting.end());
  std::vector<std::pair<int32_t, int32_t>> followers;
  const auto add_longer = [&](int32_t length) {
    while (!waiting.empty() && -std::get<0>(waiting.front()) > length) {
      const size_t c = std::get<1>(waiting.front());
      waiting.erase(waiting.begin());
      corpora_[c]->followers(matches[c], kMostEdges, followers);
      if (followers.empty()) continue;
      int64_t total = 0;
      for (const auto& one : followers) total += one.second;
      const bool single = corpora_[c]->single(matches[c]);
      const float mass = rest * corpora_known_[kind(matches[c].length, single)].value();
      for (const auto& [token, times] : followers) {
        add(token, -1, 0, mass * static_cast<float>(times) / static_cast<float>(total));
      }
      rest -= mass;
    }
  };
  int32_t s = node.state, length = node.length;
  for (int level = 0; s > SuffixAutomaton::kRoot && level < kLevels; ++level) {
    add_longer(length);
    const auto& from = automaton_.state(s);
    if (from.edges) {
      int64_t total = 0;
      int scanned = 0;
      for (int32_t e = from.first; e >= 0 && scanned < kMostEdges; ++scanned) {
        total += automaton_.state(automaton_.edge(e).target).count;
        e = automaton_.edge(e).after;
      }
      const float mass = rest * known_[kind(length, from.edges == 1)].value();
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
  add_longer(0);
  if (rest < kNegligible) return;
  const int32_t* ranked = successors.after(node.token);
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
                                const Successors& successors, const GoesOn& goes_on) const {
  SuffixTree tree;
  const auto less = [](const Node& a, const Node& b) { return a.probability < b.probability; };
  std::priority_queue<Node, std::vector<Node>, decltype(less)> waiting(less);
  std::vector<Candidate> found;
  std::vector<Matches> matches;  // of the tree's nodes
  const auto matches_of = [&](const Node& node) {
    std::vector<int32_t> context = {node.token};
    for (int32_t n = node.parent; n >= 0; n = tree.parents[static_cast<size_t>(n)]) {
      context.push_back(tree.tokens[static_cast<size_t>(n)]);
    }
    context.insert(context.end(), recent_.rbegin(), recent_.rend());
    context.resize(std::min<size_t>(context.size(), Corpus::kLongest));
    std::reverse(context.begin(), context.end());
    return followed(node.parent < 0 ? matches_ : matches[static_cast<size_t>(node.parent)],
                    context);
  };
  const auto expand = [&](const Node& node, int32_t number) {
    if (number >= 0 && !corpora_.empty()) {
      matches.resize(static_cast<size_t>(number) + 1);  // leaves have none
      matches.back() = matches_of(node);
    }
    candidates(node, matches.empty() ? matches_ : matches.back(), successors, found);
    for (const Candidate& one : found) {
      const float probability = node.probability * correction_.corrected(one.probability);
      if (probability < least) continue;
      waiting.push({probability, number, one.token, one.state, one.length, node.depth + 1});
    }
  };
  if (nodes < 1 || depth < 1) return tree;
  expand(end(), -1);
  while (!waiting.empty() && static_cast<int64_t>(tree.tokens.size()) < nodes) {
    const Node node = waiting.top();
    if (goes_on && !goes_on(tree, node.probability)) break;
    waiting.pop();
    const auto number = static_cast<int32_t>(tree.tokens.size());
    tree.parents.push_back(node.parent), tree.tokens.push_back(node.token);
    tree.probabilities.push_back(node.probability);
    if (node.depth < depth) expand(node, number);
  }
  return tree;
}

std::vector<SuffixTree> best_trees(const std::vector<const SuffixDrafter*>& requests,
                                   const std::vector<int64_t>& depths, const PassTimes& times,
                                   const Successors& successors) {
  const size_t sizes = times.rows.size();
  const auto nodes = [&](size_t i) { return static_cast<size_t>(times.rows[i]) - 1; };
  // A single tree grows only while a larger one may be better: nodes come by descending
  // probability.
  double best = 0, sum = 0;
  size_t next = 0, added = 0;
  const auto may_be_better = [&](const SuffixTree& tree, float probability) {
    for (; added < tree.tokens.size(); ++added) sum += double{tree.probabilities[added]};
    if (nodes(next) != added) return true;
    best = std::max(best, (1 + sum) / times.seconds[next++]);
    for (size_t i = next; i < sizes; ++i) {
      const double most = sum + double{probability} * static_cast<double>(nodes(i) - added);
      if ((1 + most) / times.seconds[i] > best) return true;
    }
    return false;
  };
  const bool alone = requests.size() == 1;
  std::vector<SuffixTree> trees;
  size_t longest = 0;
  for (size_t b = 0; b < requests.size(); ++b) {
    trees.push_back(
        requests[b]->draft(times.rows.back() - 1, depths[b], 0.0f, successors,
                           alone ? SuffixDrafter::GoesOn(may_be_better) : SuffixDrafter::GoesOn()));
    longest = std::max(longest, trees.back().tokens.size());
  }
  size_t chosen = 0;
  double fastest = 0;
  // Where trees end between two sizes, rows that only fill up the larger one cost less than nodes.
  for (size_t i = 0; i < sizes && (i == 0 || nodes(i - 1) < longest); ++i) {
    double tokens = 0;
    for (const SuffixTree& tree : trees) {
      const auto end = tree.probabilities.begin() +
                       static_cast<std::ptrdiff_t>(std::min(nodes(i), tree.tokens.size()));
      tokens += 1 + std::accumulate(tree.probabilities.begin(), end, 0.0);
    }
    if (tokens / times.seconds[i] > fastest) fastest = tokens / times.seconds[i], chosen = i;
  }
  for (SuffixTree& tree : trees) {
    const size_t kept = std::min(nodes(chosen), tree.tokens.size());
    tree.parents.resize(kept), tree.tokens.resize(kept), tree.probabilities.resize(kept);
  }
  return trees;
}

}  // namespace specattn
