#include "corpus.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace specattn {

Corpus::Corpus(const int32_t* tokens, const int32_t* order, int64_t size, int64_t vocabulary)
    : tokens_(tokens), order_(order), size_(size) {
  if (size > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("tokens: expected fewer than 2^31, got " + std::to_string(size));
  }
  for (int64_t i = 0; i < size; ++i) {
    if (tokens[i] < kEnd || tokens[i] >= vocabulary) {
      throw std::invalid_argument("tokens: expected -1 to " + std::to_string(vocabulary - 1) +
                                  ", got " + std::to_string(tokens[i]) + " at " +
                                  std::to_string(i));
    }
    if (order[i] < 0 || order[i] >= size) {
      throw std::invalid_argument("order: expected 0 to " + std::to_string(size - 1) + ", got " +
                                  std::to_string(order[i]) + " at " + std::to_string(i));
    }
  }
}

void Corpus::sort(const int32_t* tokens, int64_t size, int32_t* order) {
  std::iota(order, order + size, 0);
  const auto less = [=](int32_t a, int32_t b) {
    const int32_t* const left = tokens + std::min(size, int64_t{a} + kLongest + 1);
    const int32_t* const right = tokens + std::min(size, int64_t{b} + kLongest + 1);
    const auto [x, y] = std::mismatch(tokens + a, left, tokens + b, right);
    if (x == left || y == right) return x == left && (y != right || a < b);
    return *x < *y;
  };
  std::sort(order, order + size, less);
}

int32_t Corpus::first(const Match& match, int32_t token) const {
  const auto less = [&](int32_t at) {
    const int64_t behind = int64_t{at} + match.length;
    return (behind < size_ ? tokens_[behind] : kEnd) < token;
  };
  const int32_t* const begin = order_ + match.begin;
  return static_cast<int32_t>(std::partition_point(begin, order_ + match.end, less) - order_);
}

Corpus::Match Corpus::narrowed(const Match& match, int32_t token) const {
  if (token < 0 || match.length > kLongest) return {};
  const int32_t begin = first(match, token);
  const int32_t end = first({begin, match.end, match.length}, token + 1);
  return begin < end ? Match{begin, end, match.length + 1} : Match{};
}

Corpus::Match Corpus::longest(const int32_t* context, int64_t size, int32_t most) const {
  const auto matching = [&](int32_t length) {
    Match match = whole();
    for (const int32_t* t = context + size - length; t != context + size; ++t) {
      match = narrowed(match, *t);
      if (match.begin == match.end) return Match{};
    }
    return match;
  };
  Match best = whole();
  int32_t low = 0, high = static_cast<int32_t>(std::min<int64_t>({size, most, kLongest}));
  const Match match = matching(high);
  if (match.length == high) return match;
  --high;
  while (low < high) {  // an end that occurs has ends that occur
    const int32_t middle = low + (high - low + 1) / 2;
    const Match match = matching(middle);
    if (match.length == middle) {
      best = match, low = middle;
    } else {
      high = middle - 1;
    }
  }
  return best;
}

bool Corpus::single(const Match& match) const {
  return behind(match.begin, match.length) == behind(match.end - 1, match.length);
}

void Corpus::followers(const Match& match, int most,
                       std::vector<std::pair<int32_t, int32_t>>& found) const {
  found.clear();
  const int64_t width = match.end - match.begin;
  int32_t seen = match.begin;  // places before it are counted
  const int64_t stops = width <= kWalked ? width : kProbes;
  for (int64_t stop = 0; stop < stops; ++stop) {
    const auto place = static_cast<int32_t>(match.begin + width * stop / stops);
    if (place < seen) continue;
    const int32_t token = behind(place, match.length);
    const int32_t begin = first(match, token);
    seen = first({begin, match.end, match.length}, token + 1);
    if (token >= 0) found.emplace_back(token, seen - begin);
  }
  const auto more = [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  };
  std::sort(found.begin(), found.end(), more);
  if (found.size() > static_cast<size_t>(most)) found.resize(static_cast<size_t>(most));
}

}  // namespace specattn
