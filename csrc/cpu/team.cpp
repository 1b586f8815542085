#include "team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <new>
#include <thread>

#include "openmp.h"
#include "pause.h"
#include "sleep.h"

#if defined(__linux__)
#include <sched.h>
#endif
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace specattn {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostThreads = 1024;
// How long a worker that was in the way is left asleep; doubled each time in a row.
constexpr Clock::duration kBackoff = std::chrono::milliseconds(1), kMostBackoff = 64 * kBackoff;

// Where this thread runs; -1 where the system does not say.
inline int core() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Moves this thread off a core, if it may run on another. It may come back at any time: only where
// it runs now is changed, and so where the system wakes it next.
inline void move_off([[maybe_unused]] int from) {
#if defined(__linux__)
  cpu_set_t mine, others;
  if (sched_getaffinity(0, sizeof mine, &mine) != 0 || from < 0 || from >= CPU_SETSIZE) return;
  others = mine;
  CPU_CLR(from, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
  sched_setaffinity(0, sizeof mine, &mine);
#endif
}

// How many threads may take pieces, and how many pieces are left, in one word.
struct Offer {
  static constexpr int kPieceBits = 48;
  uint64_t bits = 0;

  Offer() = default;
  Offer(int threads, int64_t pieces)
      : bits(static_cast<uint64_t>(threads) << kPieceBits | static_cast<uint64_t>(pieces)) {}

  int64_t left() const { return static_cast<int64_t>(bits & ((uint64_t{1} << kPieceBits) - 1)); }
  bool open_to(int worker) const {
    return left() > 0 && worker < static_cast<int>(bits >> kPieceBits);
  }
  Offer without_one() const {
    Offer less;
    less.bits = bits - 1;
    return less;
  }
};

struct alignas(64) Seat {
  std::atomic<uint32_t> asleep{0};
  std::atomic<bool> in_the_way{false};
  // Of the caller.
  bool tried = false;
  Clock::duration backoff = kBackoff;
  Clock::time_point retry_at{};

  // Where all cores are taken, a worker may be woken on the caller's. It does pieces there, but the
  // caller has lost its time slice and waits for its core behind everybody else.
  bool worth_waking() {
    const auto now = Clock::now();
    if (in_the_way.exchange(false)) {
      retry_at = now + backoff;
      backoff = std::min(2 * backoff, kMostBackoff);
    } else if (tried) {
      backoff = kBackoff;
    }
    tried = now >= retry_at;
    return tried;
  }
};

// Every atomic access is sequentially consistent: whoever goes to sleep says so before the last
// look at what would wake it, and whoever wakes changes that before looking for sleepers.
class Team {
 public:
  bool enter() { return !busy_.exchange(true); }

  void share(int threads, int64_t pieces, Piece call, const void* work) {
    grow(std::min(threads, kMostThreads) - 1);
    threads = std::min(threads, workers_ + 1);
    call_ = {call, work, pieces};
    caller_core_ = core();
    pending_ = pieces;
    offer_ = Offer(threads, pieces);
    for (int worker = 1; worker < threads; ++worker) {
      Seat& seat = seats_[worker];
      if (seat.asleep && seat.worth_waking()) rouse(seat.asleep);
    }
    take_part(0);
    wait();
  }

  void leave() { busy_ = false; }

 private:
  struct Call {
    Piece call;
    const void* work;
    int64_t pieces;
  };

  static void rouse(std::atomic<uint32_t>& asleep) {
    asleep = 0;
    wake(asleep);
  }

  void grow(int workers) {
    try {
      for (; workers_ < workers; ++workers_) std::thread(&Team::serve, this, workers_ + 1).detach();
    } catch (const std::exception&) {  // those that there are do all pieces
    }
  }

  void serve(int worker) {
    Seat& seat = seats_[worker];
    const auto wanted = [&] { return offer_.load().open_to(worker); };
    const auto in_the_way = [&] {
      const int here = core();
      return here >= 0 && here == caller_core_;
    };
    for (;;) {
      if (spin_until(wanted, in_the_way)) {
        take_part(worker);
        continue;
      }
      seat.asleep = 1;
      if (!wanted()) sleep_while(seat.asleep, 1);
      seat.asleep = 0;
      // The system may wake it where it ran last, beside the caller, though another core is free.
      if (in_the_way()) move_off(caller_core_);
      if (in_the_way()) seat.in_the_way = true;
    }
  }

  // A piece is taken by the same step that sees that it is there and that this worker may have it.
  // Until that piece is reported its call cannot end, so only then is call_ read: a worker that
  // wakes late either takes a piece of whatever call is on now, or finds none and reads nothing.
  int64_t take(int worker) {
    Offer offer = offer_;
    while (offer.open_to(worker)) {
      if (offer_.compare_exchange_weak(offer, offer.without_one())) return offer.left();
    }
    return 0;
  }

  // Reports all its pieces at once. What it touches after that is the team's, which never dies.
  void take_part(int worker) {
    int64_t left = take(worker);
    if (left == 0) return;
    const Call call = call_;
    int64_t done = 0;
    for (; left > 0; left = take(worker), ++done) {
      call.call(call.work, call.pieces - left, worker);
    }
    if (pending_.fetch_sub(done) == done && caller_asleep_) rouse(caller_asleep_);
  }

  // Spins only so long: the system can then give this core to a worker that has lost its own.
  void wait() {
    const auto ended = [this] { return pending_ == 0; };
    if (spin_until(ended, [] { return false; })) return;
    for (;;) {
      caller_asleep_ = 1;
      if (ended()) break;
      sleep_while(caller_asleep_, 1);
    }
    caller_asleep_ = 0;
  }

  // What a worker reads to take part lies in one line, what the caller waits for in another.
  alignas(64) std::atomic<Offer> offer_{Offer()};
  std::atomic<int> caller_core_{-1};
  Call call_{};
  alignas(64) std::atomic<int64_t> pending_{0};
  std::atomic<uint32_t> caller_asleep_{0};
  alignas(64) std::atomic<bool> busy_{false};  // the rest is whoever's set it
  int workers_ = 0;
  Seat seats_[kMostThreads];
};

// Never destroyed: at exit its workers still look at it.
alignas(Team) unsigned char storage[sizeof(Team)];

Team* make_team() { return new (storage) Team; }

Team& team() {
  static Team* const made = [] {
#if !defined(_WIN32)
    // A child process has this memory but none of the threads.
    pthread_atfork(nullptr, nullptr, [] {
      forget_sleepers();
      make_team();
    });
#endif
    return make_team();
  }();
  return *made;
}

}  // namespace

void share(int threads, int64_t pieces, Piece call, const void* work) noexcept {
  if (const Region parallel = region()) {
    return share_by_openmp(parallel, threads, pieces, call, work);
  }
  Team& all = team();
  if (!all.enter()) {
    for (int64_t piece = 0; piece < pieces; ++piece) call(work, piece, 0);
    return;
  }
  all.share(threads, pieces, call, work);
  all.leave();
}

}  // namespace specattn
