// Shares the pieces of a call among threads that stay.
//
// Pieces are handed out one by one, so a thread whose core is taken delays the piece that it holds
// and nothing else: there is no barrier that every thread must reach.
#pragma once

#include <cstdint>

namespace specattn {

// Makes one call of a piece; it must not throw.
using Piece = void (*)(const void* work, int64_t piece, int worker) noexcept;

void share(int threads, int64_t pieces, Piece call, const void* work) noexcept;

// Calls work(piece, worker) once for each piece in [0, pieces), begun in this order, and returns
// when all are done. At most `threads` threads take part; each has its own number `worker` below
// that, the caller 0. While the threads serve another call, or where the system gives none, the
// caller does all pieces itself. An exception out of `work` ends the process.
template <class Work>
void parallel(int threads, int64_t pieces, const Work& work) {
  if (threads > 1 && pieces > 1) {
    const Piece call = [](const void* work, int64_t piece, int worker) noexcept {
      (*static_cast<const Work*>(work))(piece, worker);
    };
    return share(threads, pieces, call, &work);
  }
  for (int64_t piece = 0; piece < pieces; ++piece) work(piece, 0);
}

}  // namespace specattn
