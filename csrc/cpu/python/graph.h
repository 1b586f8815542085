// A graph of calls for Python, with the tensors that they point into.
#pragma once

#include "../graph.h"
#include "binder.h"

namespace specattn {

class PyGraph {
 public:
  // What is recorded by this thread, or null.
  static PyGraph*& recording() {
    static thread_local PyGraph* graph = nullptr;
    return graph;
  }

  void begin() {
    if (recording()) throw std::invalid_argument("this thread records another graph already");
    recording() = this;
  }
  void end() { recording() = nullptr; }
  void add(std::unique_ptr<const Call> call, PyObject* const* arguments, Py_ssize_t count) {
    graph_.add(std::move(call));
    // A list may be changed later: what it holds now is kept.
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const one = arguments[i];
      held_.push_back(PyList_Check(one) ? Object::made(PyList_AsTuple(one)) : Object::held(one));
    }
  }
  void replay(int threads) const {
    const Unlocked unlocked;
    graph_.replay(threads > 1 ? threads : 1);
  }
  size_t size() const { return graph_.size(); }

 private:
  Graph graph_;
  std::vector<Object> held_;
};
template <>
inline constexpr bool kIsClass<PyGraph> = true;

}  // namespace specattn
