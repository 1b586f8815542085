#include "exchange.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "pause.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if !defined(_WIN32)
#include <fcntl.h>
#include <unistd.h>
#endif

namespace specattn {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kSleep = 100;  // milliseconds between looks at who has left
constexpr int64_t kLine = 64;

// Whether a count has got as far as `piece`; counts may overflow.
bool reached(uint32_t count, uint32_t piece) { return static_cast<int32_t>(count - piece) >= 0; }

// Sleeps until the word changes, at most kSleep; may also return for no reason.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  const timespec most = {0, kSleep * 1'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
#else
  if (word == value) std::this_thread::sleep_for(std::chrono::microseconds(100));
#endif
}

void wake_all([[maybe_unused]] std::atomic<uint32_t>& word) {
#if defined(__linux__)
  constexpr int kAll = 0x7fffffff;
  syscall(SYS_futex, &word, FUTEX_WAKE, kAll, nullptr, nullptr, 0);
#endif
}

}  // namespace

int64_t Exchange::room() const {
  const int64_t seats = ranks * static_cast<int64_t>(sizeof(Seat));
  const int64_t room = (memory_bytes - seats) / (2 * ranks) / kLine * kLine;
  if (room <= 0) throw std::invalid_argument("memory is too small for so many ranks");
  return room;
}

char* Exchange::place(uint32_t piece, int r) const {
  return memory + ranks * sizeof(Seat) + ((piece & 1) * ranks + r) * room();
}

void Exchange::run() const {
  uint32_t piece = seat(rank).pieces;
  const int64_t step = room();
  for (int64_t first = 0; first < bytes; first += step) {
    const int64_t count = std::min(step, bytes - first);
    put_down(++piece, first, count);
    for (int i = 0; i < ranks; ++i) {
      const int r = (rank + i) % ranks;
      if (r != rank) wait_for(r, piece);
      std::memcpy(all + r * bytes + first, place(piece, r), static_cast<size_t>(count));
    }
  }
}

void Exchange::put_down(uint32_t piece, int64_t first, int64_t count) const {
  Seat& mine = seat(rank);
  std::memcpy(place(piece, rank), own + first, static_cast<size_t>(count));
  mine.bytes[piece & 1] = bytes;
  mine.pieces = piece;
  // Sequentially consistent: a sleeper says so before its last look at the count.
  if (mine.sleepers != 0) wake_all(mine.pieces);
}

void Exchange::wait_for(int r, uint32_t piece) const {
  Seat& other = seat(r);
  const auto came = [&] { return reached(other.pieces, piece); };
  const auto begin = Clock::now();
  spin_until(came, [] { return false; });
  while (!came()) {
    ++other.sleepers;
    if (const uint32_t seen = other.pieces; !reached(seen, piece)) {
      sleep_while(other.pieces, seen);
    }
    --other.sleepers;
    const std::chrono::duration<double> waited = Clock::now() - begin;
    if (waited < std::chrono::milliseconds(kSleep)) continue;
    const bool left = has_left(r);
    if (came()) break;
    if (left) throw std::runtime_error("rank " + std::to_string(r) + " has left the exchange");
    if (waited.count() > timeout) {
      throw std::runtime_error("rank " + std::to_string(r) + " did not come within " +
                               std::to_string(static_cast<int64_t>(timeout)) + " s");
    }
  }
  if (const int64_t theirs = other.bytes[piece & 1]; theirs != bytes) {
    throw std::invalid_argument("rank " + std::to_string(r) + " exchanges " +
                                std::to_string(theirs) + " bytes, rank " + std::to_string(rank) +
                                " " + std::to_string(bytes));
  }
}

bool Exchange::has_left([[maybe_unused]] int r) const {
#if defined(_WIN32)
  return false;
#else
  struct flock lock = {};
  lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_start = r, lock.l_len = 1;
  return fcntl(file, F_GETLK, &lock) != 0 || lock.l_type == F_UNLCK;
#endif
}

}  // namespace specattn
