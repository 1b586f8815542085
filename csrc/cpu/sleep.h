// Threads that sleep on a word of memory until another changes it.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace specattn {

#if defined(__linux__)

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

// Sleeps unless the word has another value; may also return for no reason.
inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

// Wakes whoever sleeps on a word that has been changed.
inline void wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

inline void forget_sleepers() {}

#else

struct Bedroom {
  std::mutex mutex;
  std::condition_variable changed;
};

// Never destroyed: threads may sleep in it when the process ends.
inline Bedroom* bedroom = new Bedroom;

inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  std::unique_lock<std::mutex> lock(bedroom->mutex);
  bedroom->changed.wait(lock, [&] { return word != value; });
}

inline void wake(std::atomic<uint32_t>&) {
  {
    const std::lock_guard<std::mutex> lock(bedroom->mutex);
  }
  bedroom->changed.notify_all();
}

// For the child of a fork, where a thread that is gone may hold the mutex.
inline void forget_sleepers() { bedroom = new Bedroom; }

#endif

}  // namespace specattn
