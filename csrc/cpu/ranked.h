// The largest entries of a row of logits, without a sort.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "convert.h"

namespace specattn {

constexpr int64_t kMostRanked = 64;

// Writes the places of the k largest entries, the largest first; of equals the first. NaN is none.
template <class Elem>
void largest(const Elem* x, int64_t count, int64_t k, int32_t* places) {
  constexpr int64_t kGroup = 64, kLanes = 16;
  float best[kMostRanked];
  int64_t found = 0;
  const auto takes = [&](float value) {
    return found < k ? !std::isnan(value) : value > best[found - 1];
  };
  const auto look_at = [&](int64_t i) {
    const float value = to_float(x[i]);
    if (!takes(value)) return;
    int64_t at = found < k ? found++ : k - 1;
    for (; at > 0 && value > best[at - 1]; --at)
      best[at] = best[at - 1], places[at] = places[at - 1];
    best[at] = value, places[at] = static_cast<int32_t>(i);
  };
  int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup) {
    // Maxima of lanes are independent of one another, so they are found side by side.
    float lanes[kLanes];
    std::fill(lanes, lanes + kLanes, -std::numeric_limits<float>::infinity());
    for (int64_t j = i; j < i + kGroup; j += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) {
        const float value = to_float(x[j + l]);
        lanes[l] = value > lanes[l] ? value : lanes[l];
      }
    }
    float most = lanes[0];
    for (int64_t l = 1; l < kLanes; ++l) most = lanes[l] > most ? lanes[l] : most;
    if (found == k && !(most > best[k - 1])) continue;
    for (int64_t j = i; j < i + kGroup; ++j) look_at(j);
  }
  for (; i < count; ++i) look_at(i);
  std::fill(places + found, places + k, -1);
}

// The place of the largest entry, of equals the first; -1 where one is NaN or all are -inf.
template <class Elem>
int64_t first_largest(const Elem* x, int64_t count) {
  constexpr int64_t kLanes = 16;
  float lanes[kLanes];
  bool nan = false;
  std::fill(lanes, lanes + kLanes, -std::numeric_limits<float>::infinity());
  const auto look_at = [&](int64_t i, float& best) {
    const float value = to_float(x[i]);
    best = value > best ? value : best;
    nan |= value != value;
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) look_at(i + l, lanes[l]);
  }
  for (; i < count; ++i) look_at(i, lanes[0]);
  const float best = *std::max_element(lanes, lanes + kLanes);
  if (nan || best == -std::numeric_limits<float>::infinity()) return -1;
  for (i = 0; to_float(x[i]) != best;) ++i;
  return i;
}

// The k-th largest of at least k entries, none of them NaN. `room` is for k of them.
inline float kth_largest(const float* x, int64_t count, int64_t k, std::vector<float>& room) {
  room.assign(x, x + k);
  const auto first = room.begin(), last = room.end();
  std::make_heap(first, last, std::greater<>());  // the least in front
  for (int64_t i = k; i < count; ++i) {
    if (!(x[i] > *first)) continue;
    std::pop_heap(first, last, std::greater<>());
    room.back() = x[i];
    std::push_heap(first, last, std::greater<>());
  }
  return *first;
}

}  // namespace specattn
