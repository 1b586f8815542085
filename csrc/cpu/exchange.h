// What processes of one machine gather from each other, through memory that they share.
//
// Memory holds a seat for each rank, then two shelves of a place for each. A rank puts a piece into
// its place, raises the count of its seat, and waits for the counts of the others. Shelves take
// turns: who is a piece ahead has seen everybody's last one, so all have read the one before that.
#pragma once

#include <atomic>
#include <cstdint>

namespace specattn {

struct alignas(64) Seat {
  std::atomic<uint32_t> pieces;    // that the rank has put down
  std::atomic<uint32_t> sleepers;  // that wait for another
  std::atomic<int64_t> bytes[2];   // of the exchange that the piece on each shelf is part of
};

struct Exchange {
  char* memory = nullptr;  // begins as zeros
  int64_t memory_bytes = 0;
  // Rank r holds a lock on byte r of this file as long as it takes part (POSIX, so the system gives
  // it back when a process ends, however it does).
  int file = -1;
  int rank = 0, ranks = 0;
  double timeout = 0.0;  // seconds
  const char* own = nullptr;
  char* all = nullptr;  // [ranks, bytes]
  int64_t bytes = 0;

  // Throws std::runtime_error where a rank has left or does not come within the timeout, and
  // std::invalid_argument where one exchanges another number of bytes.
  void run() const;

 private:
  Seat& seat(int r) const { return reinterpret_cast<Seat*>(memory)[r]; }
  int64_t room() const;  // bytes of a place
  char* place(uint32_t piece, int r) const;
  void put_down(uint32_t piece, int64_t first, int64_t count) const;
  void wait_for(int r, uint32_t piece) const;
  bool has_left(int r) const;
};

}  // namespace specattn
