// What the bindings of every call share: arguments taken in order, and the graph that keeps calls.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <vector>

#include "graph.h"
#include "view.h"

namespace specattn {

namespace py = pybind11;

// A graph, and the tensors that its calls point into.
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
  void end(const py::args&) { recording() = nullptr; }
  void add(std::unique_ptr<const Call> call, const py::args& arguments) {
    graph_.add(std::move(call));
    // A list may be changed later: what it holds now is kept.
    for (const py::handle one : arguments) {
      tensors_.push_back(py::isinstance<py::list>(one) ? py::tuple(one.cast<py::list>())
                                                       : one.cast<py::object>());
    }
  }
  void replay(int threads) const {
    const py::gil_scoped_release release;
    graph_.replay(threads > 1 ? threads : 1);
  }
  size_t size() const { return graph_.size(); }

 private:
  Graph graph_;
  std::vector<py::object> tensors_;
};

// The arguments of an operator, taken in the order of its signature; the number of threads is last.
class Arguments {
 public:
  explicit Arguments(const py::args& all) : all_(all) {}

  View tensor(const char* name) { return {name, next()}; }
  // One whose last dimension may be strided, too.
  View strided(const char* name) { return {name, next(), true}; }
  template <class T>
  T value() {
    return next().cast<T>();
  }

  // Checks and runs a call whose arguments have all been taken; a graph keeps it.
  void run(std::unique_ptr<const Call> call) {
    const int threads = value<int>();
    if (at_ != PyTuple_GET_SIZE(all_.ptr())) throw py::type_error("too many arguments");
    call->check();
    {
      const py::gil_scoped_release release;
      call->run(threads > 1 ? threads : 1);
    }
    if (PyGraph* const graph = PyGraph::recording()) graph->add(std::move(call), all_);
  }

 private:
  py::handle next() {
    if (at_ == PyTuple_GET_SIZE(all_.ptr())) throw py::type_error("too few arguments");
    return PyTuple_GET_ITEM(all_.ptr(), at_++);
  }

  const py::args& all_;
  py::ssize_t at_ = 0;
};

// The type of queries, keys or values.
inline Dtype floating(const View& q, int dims = 4) {
  if (q.dims != dims) q.fail("must have " + std::to_string(dims) + " dimensions");
  if (q.dtype > Dtype::kFloat16) q.fail("must be float32, bfloat16 or float16");
  const int64_t head_dim = q.shape[dims - 1];
  if (head_dim % 8 || head_dim > kMaxHeadDim || head_dim == 0) {
    q.fail("must have a head_dim that is a multiple of 8 up to 256");
  }
  return q.dtype;
}

// The scales of a cache of 8 bits: [Hk], or in the places of its tokens; none are 1.
inline Rows scale_rows(const View& scale, const View& cache) {
  static const float one = 1.0f;
  if (!scale) return {&one, 0, 0, 0};
  if (!of_8_bits(cache.dtype)) scale.fail("must be None for a cache of more than 8 bits");
  const int64_t heads = cache.shape[2];
  if (scale.dims == 1) {
    scale.expect(Dtype::kFloat32, {heads});
    return {scale.data, 0, 0, scale.stride[0]};
  }
  scale.expect(Dtype::kFloat32, {cache.shape[0], cache.shape[1], heads});
  return scale.rows();
}

// Defines the calls that a pass consists of besides attention.
void define_layer(py::module_& m);
void define_candidates(py::module_& m);
void define_recurrent(py::module_& m);
void define_suffix(py::module_& m);
void define_walk(py::module_& m);
void define_exchange(py::module_& m);

}  // namespace specattn
