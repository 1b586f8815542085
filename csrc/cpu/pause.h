// What a thread does between two looks at memory that another is about to change.
#pragma once

#include <chrono>

namespace specattn {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Longer than the gap between two steps of a pass, far shorter than a time slice of the system.
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kPausesPerLook = 32;  // at the clock

// Returns whether `condition` became true in time, and before `in_the_way` did.
template <class Condition, class Obstacle>
bool spin_until(const Condition& condition, const Obstacle& in_the_way) {
  if (condition()) return true;
  const auto end = std::chrono::steady_clock::now() + kSpin;
  while (!in_the_way() && std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (condition()) return true;
      pause();
    }
  }
  return false;
}

}  // namespace specattn
