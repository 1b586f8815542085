// Texts that do not grow, and all their suffixes in order (Manber and Myers, 1990): where the end
// of another text occurs in them, and what followed it there. Both arrays may be mapped from a
// file.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace specattn {

class Corpus {
 public:
  static constexpr int32_t kLongest = 63;  // tokens of the longest match; the order knows one more
  static constexpr int32_t kEnd = -1;      // between two texts: nothing matches it or follows

  // The suffixes that begin with the `length` tokens of a match: a range of the order.
  struct Match {
    int32_t begin = 0, end = 0, length = 0;
  };

  // The arrays must live as long as this does. Throws where `order` leads out of the tokens, or
  // where a token is not below `vocabulary`.
  Corpus(const int32_t* tokens, const int32_t* order, int64_t size, int64_t vocabulary);

  // Fills `order` with the places of all suffixes, by their first kLongest + 1 tokens.
  static void sort(const int32_t* tokens, int64_t size, int32_t* order);

  int64_t size() const { return size_; }
  // The longest end of a context that occurs here, of at most `most` tokens.
  Match longest(const int32_t* context, int64_t size, int32_t most) const;
  // A match with one more token behind it, then perhaps one too long; empty where that never came.
  Match narrowed(const Match& match, int32_t token) const;
  // Whether the same always followed a match.
  bool single(const Match& match) const;
  // What follows a match, and how often, the most frequent first: of few occurrences all, of many
  // those that are met at places that lie evenly in their order.
  void followers(const Match& match, int most,
                 std::vector<std::pair<int32_t, int32_t>>& found) const;

 private:
  static constexpr int32_t kWalked = 256, kProbes = 32;

  Match whole() const { return {0, static_cast<int32_t>(size_), 0}; }
  int32_t behind(int32_t place, int32_t length) const {
    const int64_t at = int64_t{order_[place]} + length;
    return at < size_ ? tokens_[at] : kEnd;
  }
  // The first place of a match's where no lesser token follows it; a text's end is less than all.
  int32_t first(const Match& match, int32_t token) const;

  const int32_t* tokens_;
  const int32_t* order_;
  int64_t size_;
};

}  // namespace specattn
