// The threads of this process's OpenMP in place of ours, for a host that has bound each to a core.
//
// Nothing is linked: the host has one OpenMP, and a second one beside it would fight it for cores.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <dlfcn.h>
#endif

#include "team.h"

namespace specattn {

// Of GNU's OpenMP, which Intel's and LLVM's have, too: runs body(data) in every thread of a team.
using Region = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

inline std::atomic<Region>& region() {
  static std::atomic<Region> chosen{nullptr};
  return chosen;
}

// Chooses whose threads take pieces from now on; returns whether it is OpenMP's.
inline bool use_openmp([[maybe_unused]] bool on) {
  Region found = nullptr;
#if defined(__linux__)
  if (on) found = reinterpret_cast<Region>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#endif
  region() = found;
  return found != nullptr;
}

// As `share`: pieces one by one, in their order, to whichever thread is free.
inline void share_by_openmp(Region parallel, int threads, int64_t pieces, Piece call,
                            const void* work) noexcept {
  struct Shared {
    int64_t pieces;
    Piece call;
    const void* work;
    std::atomic<int> workers{0};
    std::atomic<int64_t> next{0};
  } shared{pieces, call, work};
  const auto take_part = [](void* data) {
    Shared& all = *static_cast<Shared*>(data);
    const int worker = all.workers++;
    for (int64_t piece; (piece = all.next++) < all.pieces;) all.call(all.work, piece, worker);
  };
  if (pieces < threads) threads = static_cast<int>(pieces);
  parallel(take_part, &shared, static_cast<unsigned>(threads), 0);
}

}  // namespace specattn
