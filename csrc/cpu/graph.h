// A list of kernel calls on fixed memory that runs again in one go: on a CPU what a CUDA graph is
// on a GPU. What Python does between the calls is left out, so a pass costs what its kernels cost.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "linear.h"
#include "recurrent.h"
#include "run.h"

namespace specattn {

class Call {
 public:
  virtual ~Call() = default;
  // Throws where a length or an index points outside what was given: they may change between runs.
  virtual void check() const {}
  virtual void run(int threads) const = 0;
};

// A problem of which every value was checked when it was made.
template <class Problem>
struct PlainCall : Problem, Call {
  void run(int threads) const override {
    specattn::run(static_cast<const Problem&>(*this), threads);
  }
};

class Graph {
 public:
  Graph() = default;
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void add(std::unique_ptr<const Call> call) { calls_.push_back(std::move(call)); }
  size_t size() const { return calls_.size(); }

  void replay(int threads) const {
    for (const auto& call : calls_) {
      call->check();
      call->run(threads);
    }
  }

 private:
  std::vector<std::unique_ptr<const Call>> calls_;
};

}  // namespace specattn
